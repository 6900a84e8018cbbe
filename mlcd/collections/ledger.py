"""The source of truth of a collection: every item, in SQLite, durable when a transaction has ended.

    items      row, id, metadata (JSON), checksum of these
    vectors    row, float32 little-endian, checksum
    facts      what the collection is pinned to

A row number stands for one vector for ever: a new vector of the same id gets a new number, and the
number of a deleted one is never used again. So an index that was made of some rows stays right
about them, and what it lacks has other numbers. The write-ahead log has synchronous=FULL: a
transaction has reached the disk when COMMIT returns.

An open connection has three descriptors: one each for the file, its log, and the log's index. A
ledger that rests has none.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ArtifactInvalid, Conflict, DiskFull, MlcdError, Unavailable
from mlcd.too_many_files import lacks_open_files, too_many_files
from mlcd.types import Embeddings

SCHEMA: Final = 1
# `MLCD`, the application id in the file's header
_APPLICATION: Final = 0x4D4C4344
_TABLES: Final = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE items (row INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
                    metadata TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE vectors (row INTEGER PRIMARY KEY, vector BLOB NOT NULL, checksum INTEGER NOT NULL);
"""
# bytes; with the default of 4 KiB a vector of 512 dimensions leaves half a page empty
_PAGE_BYTES: Final = 16_384
_CHECKPOINT_PAGES: Final = 1000
_NO_SPACE: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_REFUSED: Final = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM})
_NOT_OPENED: Final = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR})
_ROWS_A_QUERY: Final = 500


@dataclass(frozen=True)
class StoredItem:
    """One item without its vector; metadata is JSON."""

    row: int
    id: str
    metadata: str


class Ledger:
    """One connection, opened at its first use; its owner lets one thread in at a time."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path, self._read_only = path, read_only
        self._connected: sqlite3.Connection | None = None
        self._left: tuple[int, int] | None = None

    @property
    def _connection(self) -> sqlite3.Connection:
        """Returns the open connection.

        Raises Unavailable where the file cannot be opened now, Conflict where it is another one
        than before.
        """
        if self._connected is None:
            if self._left is not None and not self._path.is_file():  # SQLite would create one
                raise self._replaced()
            connection = _connect_to_read(self._path) if self._read_only else _connect(self._path)
            if self._left is not None and self._left != _identity(self._path, connection):
                connection.close()
                raise self._replaced()
            self._connected = connection
        return self._connected

    def _replaced(self) -> Conflict:
        """Returns the error for a file other than the one that the items in memory came from."""
        return Conflict(
            f"the ledger of {self._path.parent.name} was removed or replaced meanwhile",
            remedy="open the collection again",
        )

    @classmethod
    def create(cls, path: Path, facts: Mapping[str, Any]) -> "Ledger":
        ledger = cls(path)
        try:
            with _translated(path):
                ledger._connection.executescript(_TABLES)
                ledger._connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                ledger._connection.execute(f"PRAGMA user_version = {SCHEMA}")
            with ledger.transaction():
                stated = [(name, json.dumps(value)) for name, value in facts.items()]
                ledger._connection.executemany("INSERT INTO facts VALUES (?, ?)", stated)
        except BaseException:
            ledger.rest()
            raise
        return ledger

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> "Ledger":
        """Opens the ledger.

        read_only: nothing in its folder is written or made; no other process may write it
        meanwhile. Raises ArtifactInvalid where the file is damaged or not ours.
        """
        if not path.is_file():
            raise ArtifactInvalid(
                f"{path} is missing", remedy="restore the collection, or import it again"
            )
        ledger = cls(path, read_only=read_only)
        try:
            ledger._check()
        except BaseException:
            ledger.rest()
            raise
        return ledger

    def _check(self) -> None:
        with _translated(self._path):
            application = self._connection.execute("PRAGMA application_id").fetchone()[0]
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if application != _APPLICATION:
            raise ArtifactInvalid(f"{self._path} is not a collection's ledger", remedy="restore it")
        if version > SCHEMA:
            raise ArtifactInvalid(
                f"{self._path} is of schema {version}", remedy="upgrade mlcd to read it"
            )

    def rest(self) -> None:
        """Closes the connection until the next use; its log is written into the file, which is
        synced.
        """
        if self._connected is not None:
            with suppress(MlcdError, sqlite3.Error, OSError):
                self._left = _identity(self._path, self._connected)
            self._connected.close()
            self._connected = None

    def state(self, name: str, value: Any) -> None:
        """Replaces one of the facts; durable when it returns."""
        with _translated(self._path):
            self._connection.execute(
                "UPDATE facts SET value = ? WHERE name = ?", (json.dumps(value), name)
            )

    def facts(self) -> dict[str, Any]:
        with _translated(self._path):
            return {
                name: json.loads(value)
                for name, value in self._connection.execute("SELECT * FROM facts")
            }

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Opens a transaction that is on the disk when the block ends, or not at all.

        Raises DiskFull where there is no space left.
        """
        with _translated(self._path):
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def find(self, item_id: str) -> StoredItem | None:
        found = self._connection.execute(
            "SELECT row, id, metadata FROM items WHERE id = ?", (item_id,)
        ).fetchone()
        return StoredItem(*found) if found else None

    def insert(self, item_id: str, vector: Embeddings, metadata: str) -> int:
        """Inserts an item and returns the new row's number."""
        checksum = _checksum(item_id, metadata)
        cursor = self._connection.execute(
            "INSERT INTO items (id, metadata, checksum) VALUES (?, ?, ?)",
            (item_id, metadata, checksum),
        )
        assert cursor.lastrowid is not None
        blob = vector.astype("<f4", copy=False).tobytes()
        self._connection.execute(
            "INSERT INTO vectors VALUES (?, ?, ?)", (cursor.lastrowid, blob, zlib.crc32(blob))
        )
        return cursor.lastrowid

    def describe(self, item: StoredItem, metadata: str) -> None:
        """Replaces the metadata of the same row."""
        self._connection.execute(
            "UPDATE items SET metadata = ?, checksum = ? WHERE row = ?",
            (metadata, _checksum(item.id, metadata), item.row),
        )

    def remove(self, row: int) -> None:
        self._connection.execute("DELETE FROM items WHERE row = ?", (row,))
        self._connection.execute("DELETE FROM vectors WHERE row = ?", (row,))

    def items(self) -> Iterator[StoredItem]:
        """Yields all items, by ascending row. Raises ArtifactInvalid naming the first that is
        damaged.
        """
        with _translated(self._path):
            for row, item_id, metadata, checksum in self._connection.execute(
                "SELECT * FROM items ORDER BY row"
            ):
                if checksum != _checksum(item_id, metadata):
                    raise ArtifactInvalid(
                        f"item {row} of {self._path} is damaged", remedy="restore the collection"
                    )
                yield StoredItem(row, item_id, metadata)

    def vectors(self, rows: Sequence[int] | NDArray[np.int64], dimension: int) -> Embeddings:
        """Returns the vectors of the rows, [len(rows), dimension] float32, in this order.

        Raises ArtifactInvalid naming the first that is damaged.
        """
        vectors = np.empty((len(rows), dimension), dtype=np.float32)
        with _translated(self._path):
            for start in range(0, len(rows), _ROWS_A_QUERY):
                part = [int(row) for row in rows[start : start + _ROWS_A_QUERY]]
                marks = ",".join("?" * len(part))
                columns = "row, vector, checksum"
                query = f"SELECT {columns} FROM vectors WHERE row IN ({marks})"  # noqa: S608
                found = {
                    row: (blob, checksum)
                    for row, blob, checksum in self._connection.execute(query, part)
                }
                for index, row in enumerate(part, start):
                    blob, checksum = found.get(row, (b"", 0))
                    if zlib.crc32(blob) != checksum or len(blob) != 4 * dimension:
                        raise ArtifactInvalid(
                            f"the vector of item {row} of {self._path} is damaged",
                            remedy="restore the collection",
                        )
                    vectors[index] = np.frombuffer(blob, dtype="<f4")
        return vectors


def _connect(path: Path) -> sqlite3.Connection:
    with _translated(path):
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            # of a new file; an old one keeps its own
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        except BaseException:
            connection.close()
            raise
    return connection


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Connects without writing to the folder.

    After a clean close the file is complete, and SQLite need not look for more. After a crash the
    log is part of it and is read in place.
    """
    log = path.with_name(f"{path.name}-wal")
    mode = "mode=ro" if log.is_file() and log.stat().st_size else "immutable=1"
    with _translated(path):
        return sqlite3.connect(
            f"{path.resolve().as_uri()}?{mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )


def _identity(path: Path, connection: sqlite3.Connection) -> tuple[int, int]:
    """Returns the file's inode number, which another file may get later, and the number of the last
    row made in it.
    """
    with _translated(path):
        last = connection.execute("SELECT max(seq) FROM sqlite_sequence").fetchone()[0]
    return path.stat().st_ino, last or 0


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the details
        if code in _NOT_OPENED and lacks_open_files():
            raise too_many_files() from error
        if code in _NO_SPACE:
            raise DiskFull(
                f"{path} cannot be written: the disk is full or fails",
                remedy="free space and send the request again; what was acknowledged before is"
                " kept",
            ) from error
        if code in _DAMAGED:
            raise ArtifactInvalid(f"{path} is damaged", remedy="restore the collection") from error
        if code in _REFUSED:
            raise Unavailable(
                f"{path} cannot be written", remedy="give a writable folder"
            ) from error
        raise


def _checksum(item_id: str, metadata: str) -> int:
    return zlib.crc32(metadata.encode(), zlib.crc32(item_id.encode()))
