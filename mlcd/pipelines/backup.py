"""Backups of a server's state directory, taken while servers write to it, and their restoration.

    backup.json    written last: size and SHA-256 of every file, number of items per collection
    collections/   ledger, thumbnails, layout and newest index of each; other files are derived
    jobs/          the queue
    usage.sqlite   the usage of API keys
    names/         the names that users gave centers on the server
    keys.json      the API keys, if the state directory contains them

SQLite files are copied with SQLite's backup API, each as a consistent snapshot. A ledger never
reuses row ids. The index and the layout refer to row ids, so they are copied before the ledger: an
index newer than the ledger would contain rows that the restored ledger assigns to other items.
Thumbnails are copied last; opening the collection removes thumbnails of rows missing in the ledger.
"""

import hashlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Final

from mlcd.artifacts.disk import (
    raise_if_disk_full,
    replacing,
    sync_path,
    temporary_path,
    translate_os_errors,
)
from mlcd.artifacts.manifest import draft_path
from mlcd.artifacts.sealed_json import read_sealed, write_sealed
from mlcd.collections.folder import GENERATIONS, LEDGER
from mlcd.collections.generation import newest_number
from mlcd.collections.ledger import Ledger
from mlcd.collections.locks import LOCK
from mlcd.collections.plane import LAYOUT
from mlcd.collections.thumbnail_store import THUMBNAILS
from mlcd.errors import ArtifactInvalid, Conflict, DiskFull, InvalidInput, MlcdError, NotFound
from mlcd.version import __version__

BACKUP: Final = "backup.json"
COLLECTIONS: Final = "collections"
QUEUE: Final = Path("jobs") / "queue.sqlite"
USAGE: Final = Path("usage.sqlite")
NAMES: Final = "names"
KEYS: Final = "keys.json"
_DRAFT_SUFFIX: Final = draft_path(Path("name")).suffix
_FORMAT: Final = 1
_ATTEMPTS: Final = 5  # if a collection or its index is replaced while it is copied
_LOCK_TIMEOUT_S: Final = 60.0
_IGNORED_NAMES: Final = frozenset({"lost+found"})  # present in the root of a file system


@dataclass(frozen=True)
class Backup:
    """Facts about a backup.

    items: number of items per collection. left_out: reason for each missing part, by its path.
    """

    files: int
    bytes: int
    items: dict[str, int]
    queue: bool
    keys: bool
    left_out: dict[str, str] = field(default_factory=dict)


class _PartChanged(Exception):
    """A part was deleted or replaced while it was copied."""


def back_up(state: Path, out: Path) -> Backup:
    """Copies the state to a new directory `out`, which one rename publishes.

    A damaged part is left out and named in the result. Raises NotFound if `state` is not a
    directory, InvalidInput if it is empty or contains `out`, Conflict if `out` exists.
    """
    if not state.is_dir():
        raise NotFound(
            f"the state must be a directory, got {state}",
            remedy="name the directory of `mlcd serve --state`",
        )
    if out.resolve().is_relative_to(state.resolve()):
        raise InvalidInput(
            f"the backup must be outside {state}, got {out}", remedy="name another directory"
        )
    _check_empty(out, remedy="name a new directory")
    with translate_os_errors(out):
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with replacing(out) as draft:
                draft.mkdir(mode=0o700)
                return _copy_state(state, draft)
        except OSError as error:
            raise_if_disk_full(error, out)
            raise


def restore(backup: Path, state: Path) -> Backup:
    """Copies a backup to an empty or new directory `state`, after verifying every checksum.

    Raises NotFound if `backup` is not a finished backup, ArtifactInvalid naming the first file that
    differs, Conflict if `state` is not empty.
    """
    manifest = read_sealed(backup / BACKUP, remedy="take another backup")
    if manifest is None:
        raise NotFound(
            f"{backup} is not a finished backup: it lacks {BACKUP}",
            remedy="name a directory made by `mlcd backup`",
        )
    if manifest["format"] > _FORMAT:
        raise ArtifactInvalid(f"{backup} has a newer format", remedy="upgrade mlcd to read it")
    _check_empty(state, remedy="stop the server and move the existing files away")
    with translate_os_errors(state):
        try:
            state.mkdir(parents=True, exist_ok=True)
            draft = temporary_path(state / "restored")
            try:
                _copy_verified(backup, draft, manifest["files"])
                for path in sorted(draft.iterdir()):
                    path.rename(state / path.name)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
            sync_path(state)
        except OSError as error:
            raise_if_disk_full(error, state)
            raise
    return _summarize(manifest)


def _check_empty(path: Path, *, remedy: str) -> None:
    if path.exists() and not path.is_dir():
        raise Conflict(f"{path} exists", remedy=remedy)
    if path.is_dir() and {entry.name for entry in path.iterdir()} - _IGNORED_NAMES:
        raise Conflict(f"{path} is not empty", remedy=remedy)


def _copy_state(state: Path, draft: Path) -> Backup:
    """Copies all parts, then writes the manifest."""
    items, left_out = {}, {}
    for name in _list_collections(state):
        part = Path(COLLECTIONS) / name
        try:
            num_items = _copy_collection(state / part, draft / part)
        except MlcdError as error:
            _raise_if_disk_full(error)
            shutil.rmtree(draft / part, ignore_errors=True)
            left_out[str(part)] = str(error)
            continue
        if num_items is not None:
            items[name] = num_items
    for part in (QUEUE, USAGE):
        if not (state / part).is_file():
            continue
        try:
            _copy_sqlite(state / part, draft / part)
        except MlcdError as error:
            _raise_if_disk_full(error)
            (draft / part).unlink(missing_ok=True)
            left_out[str(part)] = str(error)
    for path in [*sorted((state / NAMES).glob("[!.]*.json")), state / KEYS]:
        with suppress(FileNotFoundError):
            _copy_file(path, draft / path.relative_to(state))
    files = {
        path.relative_to(draft).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)}
        for path in _list_files(draft)
    }
    if not files and not left_out:
        raise InvalidInput(
            f"{state} must contain collections, jobs, names or {KEYS}, found none of them",
            remedy="name the directory of `mlcd serve --state`",
        )
    manifest = {
        "format": _FORMAT,
        "version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "items": items,
        "left_out": left_out,
        "files": files,
    }
    write_sealed(draft / BACKUP, manifest)
    return _summarize(manifest)


def _raise_if_disk_full(error: MlcdError) -> None:
    """Raises DiskFull again; any other error concerns only one damaged part."""
    if isinstance(error, DiskFull):
        raise error


def _summarize(manifest: dict[str, Any]) -> Backup:
    files = manifest["files"]
    return Backup(
        files=len(files),
        bytes=sum(facts["bytes"] for facts in files.values()),
        items=manifest["items"],
        queue=QUEUE.as_posix() in files,
        keys=KEYS in files,
        left_out=manifest["left_out"],
    )


def _list_collections(state: Path) -> list[str]:
    return sorted(
        path.name
        for path in (state / COLLECTIONS).glob("*")
        if path.is_dir() and not path.name.startswith(".") and path.suffix != _DRAFT_SUFFIX
    )


def _copy_collection(source: Path, target: Path) -> int | None:
    """Copies a collection and returns its number of items; None if it was deleted.

    Raises ArtifactInvalid if its ledger is damaged.
    """
    for _ in range(_ATTEMPTS):
        try:
            # an open folder's inode is not reused, so a replaced folder is noticed
            folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        try:
            num_items = _copy_parts(source, target)
            if source.exists() and source.stat().st_ino == os.fstat(folder).st_ino:
                return num_items
        except _PartChanged:
            pass
        finally:
            os.close(folder)
        shutil.rmtree(target, ignore_errors=True)
    if not source.exists():
        return None
    raise ArtifactInvalid(
        f"{source} lacks {LEDGER}, or was replaced during {_ATTEMPTS} attempts to copy it",
        remedy="restore the collection, or delete it",
    )


def _copy_parts(source: Path, target: Path) -> int:
    """Copies the parts of a collection; the module's docstring explains their order."""
    number = newest_number(source / GENERATIONS)
    (target / GENERATIONS).mkdir(parents=True)
    parts = [LAYOUT] if number is None else [f"{GENERATIONS}/{number:08d}", LAYOUT]
    for part in parts:
        for path in sorted((source / part).glob("*")):
            try:
                _copy_file(path, target / part / path.name)
            except FileNotFoundError as error:
                raise _PartChanged from error
    if not (source / LEDGER).is_file():
        raise _PartChanged
    _copy_sqlite(source / LEDGER, target / LEDGER)
    ledger = Ledger.open(target / LEDGER, read_only=True)
    try:
        num_items = sum(1 for _ in ledger.items())
    finally:
        ledger.close_until_used()
    if (source / THUMBNAILS).is_file():
        with suppress(ArtifactInvalid):  # thumbnails can be made again
            _copy_sqlite(source / THUMBNAILS, target / THUMBNAILS)
    (target / LOCK).touch()
    return num_items


def _copy_sqlite(source: Path, target: Path) -> None:
    """Copies a snapshot of an SQLite file that may be in use. Raises ArtifactInvalid, DiskFull."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            closing(
                sqlite3.connect(
                    f"{source.resolve().as_uri()}?mode=rw", uri=True, timeout=_LOCK_TIMEOUT_S
                )
            ) as reader,
            closing(sqlite3.connect(target)) as writer,
        ):
            reader.backup(writer)
            writer.execute("PRAGMA journal_mode = DELETE")  # a single file, without -wal and -shm
            is_whole = writer.execute("PRAGMA integrity_check(1)").fetchone()[0] == "ok"
    except sqlite3.Error as error:
        target.unlink(missing_ok=True)
        if not source.exists():
            raise _PartChanged from error
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise DiskFull(
                f"{source} cannot be copied: the disk is full or failing",
                remedy="free space and run the same command again",
            ) from error
        raise ArtifactInvalid(f"{source} cannot be read: {error}", remedy="restore it") from error
    if not is_whole:
        target.unlink()
        raise ArtifactInvalid(f"{source} is damaged", remedy="restore it")
    sync_path(target)


def _copy_file(source: Path, target: Path) -> None:
    if source.exists() and not os.access(source, os.R_OK):
        raise InvalidInput(
            f"{source} cannot be read: no permission",
            remedy="run this command as the server's user",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    sync_path(target)


def _copy_verified(backup: Path, draft: Path, files: dict[str, dict[str, Any]]) -> None:
    draft.mkdir()
    for name, facts in files.items():
        part = PurePosixPath(name)
        if part.is_absolute() or ".." in part.parts:
            raise ArtifactInvalid(
                f"{backup / BACKUP} must list files inside the backup, got {name}",
                remedy="take another backup",
            )
        try:
            _copy_file(backup / part, draft / part)
        except FileNotFoundError as error:
            raise ArtifactInvalid(
                f"{backup / part} is missing", remedy="take another backup"
            ) from error
        if _digest(draft / part) != facts["sha256"]:
            raise ArtifactInvalid(
                f"{backup / part} differs from {BACKUP}", remedy="take another backup"
            )
    for folder in {path.parent for path in _list_files(draft)}:
        sync_path(folder)
    for collection in (draft / COLLECTIONS).glob("*"):
        (collection / GENERATIONS).mkdir(exist_ok=True)


def _list_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
