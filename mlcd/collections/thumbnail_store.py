"""The thumbnails of a collection's items, in an SQLite file beside the ledger.

    pictures   digest, picture, number of items that show it: equal pictures are stored once
    shown      row, digest: the picture of the item with this row of the ledger
    totals     the number of items and of pictures, and the bytes of the pictures

A thumbnail belongs to a row of the ledger, not to an id: a new vector of the same id has a new row,
so no item can show the picture of an earlier vector. The ledger decides which rows exist, and is
written first; pictures of deleted rows that a crash leaves here are removed when the collection is
opened. The file may be deleted while no process has the collection open. A power cut may lose the
last transactions, but never part of a transaction.
"""

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlcd.collections.open_ledgers import OpenLedgers
from mlcd.errors import ArtifactInvalid, Unavailable
from mlcd.images.thumbnail import Thumbnail
from mlcd.too_many_files import lacks_open_files, too_many_files

THUMBNAILS: Final = "thumbnails.sqlite"
DEFAULT_MAX_BYTES: Final = 2 * 2**30
_APPLICATION: Final = 0x4D4C4354  # `MLCT`
_SCHEMA: Final = 1
_TABLES: Final = """
CREATE TABLE pictures (digest BLOB PRIMARY KEY, picture BLOB NOT NULL, shown INTEGER NOT NULL);
CREATE TABLE shown (row INTEGER PRIMARY KEY, digest BLOB NOT NULL);
CREATE TABLE totals (items INTEGER NOT NULL, pictures INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0, 0);
"""
_PAGE_BYTES: Final = 16_384
_CHECKPOINT_PAGES: Final = 1000
_ROWS_PER_QUERY: Final = 500
_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_Result = TypeVar("_Result")
_log = logging.getLogger("mlcd.collections")


@dataclass(frozen=True)
class Stored:
    """The size of a store, as reported by `mlcd.wire.DescribedThumbnails`."""

    items: int = 0
    pictures: int = 0
    bytes: int = 0
    max_bytes: int = DEFAULT_MAX_BYTES
    full: bool = False


class ThumbnailStore:
    """The thumbnails of one collection. All methods are thread-safe.

    The file is created with the first picture. Damage and disk errors are only logged, so that
    items can be added and found without thumbnails.
    """

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool,
        max_bytes: int = DEFAULT_MAX_BYTES,
        ledgers: OpenLedgers | None = None,
    ) -> None:
        """max_bytes: bound on the total size of the pictures. ledgers: see `Collection.open`."""
        self._path, self._read_only, self._ledgers = path, read_only, ledgers
        self._connected: sqlite3.Connection | None = None
        self._using = threading.Lock()
        self._exists, self._damaged = path.is_file(), False
        self._stored = Stored(max_bytes=max_bytes)

    def open(self, rows: NDArray[np.int64]) -> None:
        """Reads the size of the store, and removes the pictures of rows that do not exist.

        rows: all rows of the ledger, ascending.
        """
        if not self._exists:
            return
        totals = self._use("opened", _read_totals)
        if self._damaged and not self._read_only:
            self._remove_damaged_file()
        if totals is None:
            return
        items, pictures, num_bytes = totals
        self._stored = replace(self._stored, items=items, pictures=pictures, bytes=num_bytes)
        stored_rows = self.rows()
        self.change(removed_rows=stored_rows[~np.isin(stored_rows, rows)].tolist(), added={})

    def describe(self) -> Stored | None:
        """Returns the size of the store, or None if nothing was ever added."""
        return self._stored if self._exists or self._stored.full else None

    @property
    def is_full(self) -> bool:
        """Returns whether a picture was refused, and none was removed since."""
        return self._stored.full

    def change(self, *, removed_rows: Sequence[int], added: Mapping[int, Thumbnail]) -> None:
        """Removes the pictures of `removed_rows` and adds pictures by row, in one transaction.

        A picture that would exceed `max_bytes` is skipped and makes the store full.
        """
        if self._read_only or self._damaged or not (added or (removed_rows and self._exists)):
            return

        def write(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                stored = _drop(connection, self._stored, removed_rows)
                for row, picture in added.items():
                    stored = _put(connection, stored, row, picture)
                _write_totals(connection, stored)
            self._stored = stored

        self._use("changed", write)

    def read(self, row: int) -> Thumbnail | None:
        """Returns the picture of a row, or None if it has none or it cannot be read."""
        if not self._exists:
            return None
        digest_and_picture = self._use("read", partial(_read_picture, row=row))
        if digest_and_picture is None:
            return None
        digest, data = digest_and_picture
        if isinstance(data, bytes):
            picture = Thumbnail(data)
            if bytes.fromhex(picture.version) == digest:
                return picture
        _log.warning("a picture in %s is damaged", self._path)
        return None

    def versions(self, rows: Sequence[int]) -> list[str | None]:
        """Returns the version of each row's picture, None for a row without one."""
        version_of = (
            self._use("read", partial(_read_versions, rows=rows)) if self._exists else None
        ) or {}
        return [version_of.get(row) for row in rows]

    def rows(self) -> NDArray[np.int64]:
        """Returns the rows that have a picture, ascending."""
        rows = (self._use("read", _read_rows) if self._exists else None) or []
        return np.array(rows, dtype=np.int64)

    def check(self) -> None:
        """Reads every picture. Raises ArtifactInvalid if one is damaged."""
        if not (self._exists or self._damaged):
            return
        if self._damaged or not self._use("read", _are_all_intact):
            raise ArtifactInvalid(
                f"{self._path} is damaged",
                remedy="delete the file while no process has the collection open, and make the"
                " thumbnails again",
            )

    def close_until_used(self) -> bool:
        """Closes the connection until the next use; returns False if it is in use."""
        if not self._using.acquire(blocking=False):
            return False
        try:
            self._disconnect()
        finally:
            self._using.release()
        return True

    def close(self) -> None:
        with self._using:
            self._disconnect()
        if self._ledgers is not None:
            self._ledgers.forget(self)

    def _remove_damaged_file(self) -> None:
        """Removes the damaged file. Only pictures are lost, which can be made again."""
        with self._using:
            self._disconnect()
            for suffix in ("", "-wal", "-shm"):
                self._path.with_name(f"{self._path.name}{suffix}").unlink(missing_ok=True)
            self._damaged = False
        _log.warning("%s was damaged and is empty now: make the thumbnails again", self._path)

    def _disconnect(self) -> None:
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def _use(self, used: str, work: Callable[[sqlite3.Connection], _Result]) -> _Result | None:
        """Returns the result of `work`; None after an error, which is logged.

        used: past participle for the log message, such as "read".
        """
        try:
            with self._using:
                if self._connected is None:
                    self._connected = self._connect()
                    self._exists = True
                result = work(self._connected)
        except (sqlite3.Error, Unavailable, ValueError, TypeError, AttributeError) as error:
            _log.warning("%s cannot be %s: %s", self._path, used, error)
            # A value of a wrong type, which raises another kind of error, means damage too.
            is_store_error = isinstance(error, sqlite3.Error | Unavailable)
            if not is_store_error or getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
                self._exists, self._damaged = False, True
            return None
        if self._ledgers is not None:
            self._ledgers.record_use(self)
        return result

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                f"{self._path.resolve().as_uri()}?{self._mode()}",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            if lacks_open_files():
                raise too_many_files() from error
            raise
        try:
            if not self._read_only:
                _prepare(connection)
            _check(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _mode(self) -> str:
        """Returns the query of the file's URI. Read-only, a file without a log is immutable, so
        that SQLite does not look for a log.
        """
        if not self._read_only:
            return "mode=rwc"
        log = self._path.with_name(f"{self._path.name}-wal")
        return "mode=ro" if log.is_file() and log.stat().st_size else "immutable=1"


def _check(connection: sqlite3.Connection) -> None:
    """Raises DatabaseError if another program created the file."""
    if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
        raise sqlite3.DatabaseError("it is not a store of thumbnails")


def _prepare(connection: sqlite3.Connection) -> None:
    """Sets the modes of a writing connection, and creates the tables of a new file."""
    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        connection.executescript(
            f"BEGIN; {_TABLES} PRAGMA application_id = {_APPLICATION};"
            f" PRAGMA user_version = {_SCHEMA}; COMMIT;"
        )


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _drop(connection: sqlite3.Connection, stored: Stored, rows: Sequence[int]) -> Stored:
    """Removes the pictures of the rows, if they have any, and returns the new size."""
    for row in rows:
        digest = connection.execute("SELECT digest FROM shown WHERE row = ?", (row,)).fetchone()
        if digest is None:
            continue
        connection.execute("DELETE FROM shown WHERE row = ?", (row,))
        connection.execute("UPDATE pictures SET shown = shown - 1 WHERE digest = ?", digest)
        unused = connection.execute(
            "DELETE FROM pictures WHERE digest = ? AND shown <= 0 RETURNING length(picture)", digest
        ).fetchone()
        stored = replace(stored, items=stored.items - 1)
        if unused is not None:
            stored = replace(
                stored,
                pictures=stored.pictures - 1,
                bytes=stored.bytes - unused[0],
                full=False,
            )
    return stored


def _put(connection: sqlite3.Connection, stored: Stored, row: int, picture: Thumbnail) -> Stored:
    """Sets the picture of the row, and returns the new size."""
    digest = bytes.fromhex(picture.version)
    old_digest = connection.execute("SELECT digest FROM shown WHERE row = ?", (row,)).fetchone()
    if old_digest is not None and old_digest[0] == digest:
        return stored
    known = connection.execute("SELECT 1 FROM pictures WHERE digest = ?", (digest,)).fetchone()
    is_new = known is None
    if is_new and stored.bytes + len(picture.data) > stored.max_bytes:
        return replace(stored, full=True)
    stored = _drop(connection, stored, [row])
    connection.execute("INSERT INTO shown VALUES (?, ?)", (row, digest))
    connection.execute(
        "INSERT INTO pictures VALUES (?, ?, 1)"
        " ON CONFLICT (digest) DO UPDATE SET shown = shown + 1",
        (digest, picture.data),
    )
    stored = replace(stored, items=stored.items + 1)
    if is_new:
        stored = replace(
            stored, pictures=stored.pictures + 1, bytes=stored.bytes + len(picture.data)
        )
    return stored


def _read_picture(connection: sqlite3.Connection, *, row: int) -> tuple[bytes, bytes] | None:
    """Returns the digest and the picture of a row; None if it has none."""
    digest_and_picture: tuple[bytes, bytes] | None = connection.execute(
        "SELECT digest, picture FROM pictures WHERE digest ="
        " (SELECT digest FROM shown WHERE row = ?)",
        (row,),
    ).fetchone()
    return digest_and_picture


def _are_all_intact(connection: sqlite3.Connection) -> bool:
    """Returns whether every picture matches its digest."""
    return all(
        bytes.fromhex(Thumbnail(data).version) == digest
        for digest, data in connection.execute("SELECT digest, picture FROM pictures")
    )


def _read_versions(connection: sqlite3.Connection, *, rows: Sequence[int]) -> dict[int, str]:
    version_of: dict[int, str] = {}
    for start in range(0, len(rows), _ROWS_PER_QUERY):
        part = [*rows[start : start + _ROWS_PER_QUERY]]
        placeholders = ",".join("?" * len(part))
        query = f"SELECT row, digest FROM shown WHERE row IN ({placeholders})"  # noqa: S608
        version_of |= {row: digest.hex() for row, digest in connection.execute(query, part)}
    return version_of


def _read_rows(connection: sqlite3.Connection) -> list[int]:
    return [row for (row,) in connection.execute("SELECT row FROM shown ORDER BY row")]


def _read_totals(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Returns the numbers of items, pictures and bytes.

    Raises ValueError if the table `shown` is damaged: an item could show another item's picture.
    """
    if connection.execute("PRAGMA quick_check(shown)").fetchone()[0] != "ok":
        raise ValueError("its table of rows is damaged")
    items, pictures, num_bytes = connection.execute("SELECT * FROM totals").fetchone()
    return items, pictures, num_bytes


def _write_totals(connection: sqlite3.Connection, stored: Stored) -> None:
    connection.execute(
        "UPDATE totals SET items = ?, pictures = ?, bytes = ?",
        (stored.items, stored.pictures, stored.bytes),
    )
