"""The files of the service: what clients upload for batches and jobs, and what these write.

    files/files.sqlite   a row for each file, upload, batch, webhook and delivery of an event
    files/<id>           the content of a file
    files/<id>.part      the content of a file that is still being written
    files/job-<id>       what a job on an uploaded file has made, until its results are files

A file exists once its row says so. The row of an unfinished file reserves its bytes, so that
several uploads together stay within the quotas; it is dropped when its writer has been silent for
`FILE_DRAFT_S`. Servers of one machine, or of one shared folder, share the directory.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from mlcd.artifacts.disk import raise_if_disk_full, sync_path
from mlcd.errors import DiskFull, NotFound
from mlcd.service.errors import QuotaExceeded, StorageFull, TooLarge
from mlcd.service.jobs.sqlite_file import SqliteFile
from mlcd.service.jobs.uploaded_images import ArchiveLimits, check_images
from mlcd.service.settings import Files, Settings
from mlcd.service.timings import DAY_S, FILE_DRAFT_S

Purpose = Literal["batch", "batch_output", "images", "job_output", "upload_part"]
JOB_FOLDER_PREFIX: Final = "job-"  # of the folders that jobs on uploaded files work in
_RESERVED_BYTES: Final = 8 * 2**20  # an upload reserves its quota in steps of this size
_SCHEMA: Final = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS files (
  id TEXT PRIMARY KEY, owner TEXT, filename TEXT NOT NULL, purpose TEXT NOT NULL,
  bytes INTEGER NOT NULL, sha256 TEXT, created_s REAL NOT NULL, expires_s REAL NOT NULL,
  is_ready INTEGER NOT NULL, touched_s REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, id);
CREATE TABLE IF NOT EXISTS batches (
  id TEXT PRIMARY KEY, owner TEXT, is_open INTEGER NOT NULL, ended_s REAL, record TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS batches_open ON batches (id) WHERE is_open;
CREATE TABLE IF NOT EXISTS uploads (
  id TEXT PRIMARY KEY, owner TEXT, expires_s REAL NOT NULL, record TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS webhooks (
  id TEXT PRIMARY KEY, owner TEXT, record TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS webhook_deliveries (
  webhook_id TEXT, event_id TEXT, event_type TEXT NOT NULL, object_id TEXT NOT NULL,
  created_s REAL NOT NULL, state TEXT NOT NULL, due_s REAL, attempts INTEGER NOT NULL,
  attempted_s REAL, status_code INTEGER, PRIMARY KEY (webhook_id, event_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS webhook_deliveries_due ON webhook_deliveries (due_s)
  WHERE due_s IS NOT NULL;
PRAGMA user_version = 1;
COMMIT;
"""
# files, and the drafts of batches that have not ended
_IN_USE: Final = """
SELECT id FROM files
UNION ALL SELECT json_extract(record, '$.output_file_id') FROM batches WHERE is_open
UNION ALL SELECT json_extract(record, '$.error_file_id') FROM batches WHERE is_open
"""
_COLUMNS: Final = "id, owner, filename, purpose, bytes, sha256, created_s, expires_s"


@dataclass(frozen=True)
class StoredFile:
    """A file that is complete. owner: the id of the API key that made it; None without keys.

    created_s, expires_s: seconds since the epoch.
    """

    id: str
    owner: str | None
    filename: str
    purpose: Purpose
    bytes: int
    sha256: str
    created_s: float
    expires_s: float


class FileStore:
    """The files in one folder. Its methods block; threads and processes may share the folder.

    Raises Unavailable and ArtifactInvalid as `SqliteFile`.
    """

    def __init__(self, folder: Path, settings: Files) -> None:
        """The folder is made when a client first asks for files."""
        self.folder, self._settings = folder, settings
        self._opening = threading.Lock()
        self._database: SqliteFile | None = None

    @property
    def exists(self) -> bool:
        """True once a client has asked for files or batches."""
        return self.folder.is_dir()

    @property
    def database(self) -> SqliteFile:
        """The table of files, uploads and batches."""
        with self._opening:
            if self._database is None:
                path = self.folder / "files.sqlite"
                self._database = SqliteFile(
                    path, _prepare, defer_errors=True, name="the table of files"
                )
            return self._database

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    @property
    def archive_limits(self) -> ArchiveLimits:
        settings = self._settings
        return ArchiveLimits(settings.max_archive_entries, settings.max_archive_bytes)

    def check_room(self, owner: str | None, num_bytes: int) -> None:
        """Raises TooLarge, QuotaExceeded, StorageFull for a file that does not fit."""
        if num_bytes > self._settings.max_file_bytes:
            raise _too_large(self._settings.max_file_bytes)
        with self.database.writing() as writer:
            self._check_quota(writer, owner, num_bytes, num_files=1)

    def begin(
        self, owner: str | None, *, max_bytes: int | None = None, file_id: str | None = None
    ) -> "FileDraft":
        """Begins a file. max_bytes: the most that it may have; None for the setting. file_id: for a
        writer that begins the same file again after a crash; None for a new id.

        Raises QuotaExceeded where the owner has as many files as a key may have.
        """
        file_id = file_id or new_id("file-")
        with self.database.writing() as writer:
            self._check_quota(writer, owner, 0, num_files=1)
            now_s = time.time()
            writer.execute(
                "INSERT OR REPLACE INTO files VALUES (?, ?, '', 'batch', 0, NULL, ?, ?, 0, ?)",
                (file_id, owner, now_s, now_s, now_s),
            )
        return FileDraft(self, file_id, owner, max_bytes or self._settings.max_file_bytes)

    def find(self, file_id: str, owner: str | None) -> StoredFile:
        """Returns the file. Raises NotFound where this owner lacks a file of this id."""
        rows = self.database.rows(
            f"SELECT {_COLUMNS} FROM files WHERE id = ? AND owner IS ? AND is_ready",  # noqa: S608
            *(file_id, owner),
        )
        if not rows:
            raise NotFound("unknown file", remedy="GET /v1/files lists yours")
        return StoredFile(*rows[0])

    def page(
        self,
        owner: str | None,
        *,
        limit: int,
        after: str | None,
        purpose: str | None,
        newest_first: bool,
    ) -> tuple[list[StoredFile], bool]:
        """Returns some files of the owner, and whether more follow. after: the last id before."""
        comparison, order = ("<", "DESC") if newest_first else (">", "ASC")
        rows = self.database.rows(
            f"SELECT {_COLUMNS} FROM files WHERE owner IS ? AND is_ready"  # noqa: S608
            f" AND purpose != 'upload_part' AND (? IS NULL OR id {comparison} ?)"
            " AND (? IS NULL OR purpose = ?)"
            f" ORDER BY id {order} LIMIT ?",
            *(owner, after, after, purpose, purpose, limit + 1),
        )
        return [StoredFile(*row) for row in rows[:limit]], len(rows) > limit

    def path(self, file_id: str) -> Path:
        """Returns where the content of a complete file is."""
        return self.folder / file_id

    def draft_path(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.part"

    def delete(self, file_id: str, owner: str | None) -> None:
        """Deletes the file. Raises NotFound."""
        self.find(file_id, owner)
        self._drop([file_id])

    def publish(
        self,
        file_id: str,
        owner: str | None,
        filename: str,
        purpose: Purpose,
        *,
        digest: str | None = None,
        keep_s: float | None = None,
        suffix: str = "",
    ) -> StoredFile:
        """Makes a file of its content on the disk, whose bytes must be synced.

        digest: its SHA-256, where that is known. keep_s: seconds until the file is removed; None
        for the setting. suffix: added to the id, for readers that go by the name.
        """
        draft, draft_id, file_id = self.draft_path(file_id), file_id, file_id + suffix
        path = self.path(file_id)
        if draft.exists():
            draft.rename(path)
            sync_path(self.folder)
        size, now_s = path.stat().st_size, time.time()
        digest = digest or _digest_of(path)
        limit_s = self._settings.keep_days * DAY_S
        expires_s = now_s + (limit_s if keep_s is None else min(keep_s, limit_s))
        file = StoredFile(file_id, owner, filename, purpose, size, digest, now_s, expires_s)
        with self.database.writing() as writer:
            writer.execute("DELETE FROM files WHERE id = ?", (draft_id,))
            writer.execute(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1, ?)",
                (file_id, owner, filename, purpose, size, digest, now_s, expires_s, now_s),
            )
        return file

    def reserve(self, file_id: str, owner: str | None, num_bytes: int) -> None:
        """Sets the bytes that an unfinished file holds of the quotas.

        Raises QuotaExceeded, and NotFound for one that was dropped because its writer was silent.
        """
        with self.database.writing() as writer:
            ((held,),) = writer.execute(
                "SELECT COALESCE(MAX(bytes), -1) FROM files WHERE id = ?", (file_id,)
            ).fetchall()
            if held < 0:
                raise NotFound("the upload took too long", remedy="upload the file again")
            self._check_quota(writer, owner, num_bytes - held, num_files=0)
            writer.execute(
                "UPDATE files SET bytes = ?, touched_s = ? WHERE id = ?",
                (num_bytes, time.time(), file_id),
            )

    def discard(self, file_id: str) -> None:
        """Removes an unfinished file."""
        self._drop([file_id])

    def sweep(self) -> int:
        """Removes files that have expired, and what uploads that broke off have left.

        Returns the number of files removed.
        """
        now_s = time.time()
        expired = self.database.rows(
            "SELECT id FROM files WHERE (is_ready AND expires_s < ?)"
            " OR (NOT is_ready AND touched_s < ?)",
            *(now_s, now_s - FILE_DRAFT_S),
        )
        self._drop([file_id for (file_id,) in expired])
        in_use = {file_id for (file_id,) in self.database.rows(_IN_USE)}
        for path in self.folder.glob("file-*"):
            is_old = _modified_s(path) < now_s - FILE_DRAFT_S
            if is_old and path.name.removesuffix(".part") not in in_use:
                path.unlink(missing_ok=True)
        for path in self.folder.glob(
            f"{JOB_FOLDER_PREFIX}*"
        ):  # of failed jobs that nobody has retried
            if _modified_s(path) < now_s - self._settings.keep_days * DAY_S:
                shutil.rmtree(path, ignore_errors=True)
        return len(expired)

    def _drop(self, file_ids: Sequence[str]) -> None:
        with self.database.writing() as writer:
            writer.executemany("DELETE FROM files WHERE id = ?", [(each,) for each in file_ids])
        for file_id in file_ids:
            self.path(file_id).unlink(missing_ok=True)
            self.draft_path(file_id).unlink(missing_ok=True)

    def _check_quota(
        self, writer: sqlite3.Connection, owner: str | None, num_bytes: int, *, num_files: int
    ) -> None:
        settings = self._settings
        ((own_files, own_bytes),) = writer.execute(
            "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE owner IS ?", (owner,)
        ).fetchall()
        ((all_bytes,),) = writer.execute("SELECT COALESCE(SUM(bytes), 0) FROM files").fetchall()
        if own_files + num_files > settings.max_key_files:
            raise QuotaExceeded(f"{settings.max_key_files} files", limit="max_key_files")
        if own_bytes + num_bytes > settings.max_key_bytes:
            raise QuotaExceeded(f"{settings.max_key_bytes} bytes of files", limit="max_key_bytes")
        if all_bytes + num_bytes > settings.max_bytes:
            raise StorageFull


class FileDraft:
    """A file that is being written: it exists after `finish`, and leaves nothing without it."""

    def __init__(self, store: FileStore, file_id: str, owner: str | None, max_bytes: int) -> None:
        self._store, self.id, self._owner, self._max_bytes = store, file_id, owner, max_bytes
        self._num_bytes = self._num_reserved = 0
        self._digest = hashlib.sha256()
        self._is_finished = False
        try:
            self._file = store.draft_path(file_id).open("wb")
        except OSError as error:
            store.discard(file_id)
            raise _disk_error(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported by the write
            self._file.close()
        if not self._is_finished:
            self._store.discard(self.id)

    def write(self, data: bytes) -> int:
        """Appends bytes. Raises TooLarge, QuotaExceeded, StorageFull."""
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        if self._num_bytes > self._num_reserved:
            self._num_reserved = self._num_bytes + _RESERVED_BYTES
            self._reserve(min(self._num_reserved, self._max_bytes))
        self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            raise _disk_error(error) from error

    def finish(self, filename: str, purpose: Purpose, keep_s: float | None = None) -> StoredFile:
        """Makes the file exist. keep_s: seconds until it is removed; None for the setting.

        Raises InvalidInput for a file of the purpose `images` that has none; see `check_images`.
        """
        suffix = ""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if purpose == "images":
                suffix = check_images(self._store.draft_path(self.id), self._store.archive_limits)
            self._store.reserve(self.id, self._owner, self._num_bytes)
            file = self._store.publish(
                self.id,
                self._owner,
                filename,
                purpose,
                digest=self._digest.hexdigest(),
                keep_s=keep_s,
                suffix=suffix,
            )
        except OSError as error:
            raise _disk_error(error) from error
        self._is_finished = True
        return file

    def _reserve(self, num_bytes: int) -> None:
        try:
            self._store.reserve(self.id, self._owner, num_bytes)
        except QuotaExceeded:
            if num_bytes == self._num_bytes:
                raise
            self._num_reserved = self._num_bytes
            self._store.reserve(self.id, self._owner, self._num_bytes)


def open_files(settings: Settings) -> FileStore | None:
    """Opens the files in the state directory; None where there is none, or it cannot be written."""
    folder = folder_of_files(settings)
    if folder is None:
        return None
    place = folder if folder.exists() else folder.parent
    if place.exists() and not os.access(place, os.W_OK):
        return None  # the server only searches
    return FileStore(folder, settings.files)


def folder_of_files(settings: Settings) -> Path | None:
    """Returns the folder of uploaded files; None without a state directory."""
    state = settings.state_dir
    return None if state is None else Path(os.path.realpath(state)) / "files"


def collections_beside(files: Path) -> Path:
    """Returns the folder of the server's collections, beside that of its files."""
    return files.parent / "collections"


def new_id(prefix: str) -> str:
    """Returns a new id; ids of one prefix are in the order of their creation."""
    return f"{prefix}{time.time_ns() // 1000:014x}{secrets.token_hex(5)}"


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.executescript(_SCHEMA)


def _disk_error(error: OSError) -> Exception:
    try:
        raise_if_disk_full(error, Path())
    except DiskFull:
        return StorageFull()
    return error


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"a file must have at most {max_bytes} bytes", limit="max_file_bytes")


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
