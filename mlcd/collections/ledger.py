"""The source of truth of a collection: every item, in SQLite, durable after each transaction.

    items      row, id, metadata (JSON), checksum of id and metadata
    vectors    row, float32 little-endian, checksum
    facts      fixed properties of the collection, and the seal over all tables: see
               `mlcd.collections.seal`

A row number always means the same vector: a new vector of the same id gets a new number, and the
number of a deleted row is never reused. So an index never has stale vectors, and items that it
lacks have row numbers that it does not contain. The write-ahead log has synchronous=FULL: a
transaction is on the disk when COMMIT returns. The seal changes in the same transaction, which
exposes a copy whose pages were read at different moments.

An open connection uses three file descriptors: for the file, its log, and the log's index. `rest`
closes them.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.collections.seal import SEAL, Seal, facts_checksum
from mlcd.errors import ArtifactInvalid, Conflict, DiskFull, MlcdError, Unavailable
from mlcd.too_many_files import lacks_open_files, too_many_files
from mlcd.types import Embeddings

# Version 1 had no seal; opening it for writing adds one.
SCHEMA: Final = 2
# Application id in the file's header: `MLCD`
_APPLICATION: Final = 0x4D4C4344
_TABLES: Final = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE items (row INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
                    metadata TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE vectors (row INTEGER PRIMARY KEY, vector BLOB NOT NULL, checksum INTEGER NOT NULL);
"""
# With SQLite's default of 4 KiB, a vector of 512 dimensions leaves half a page empty.
_PAGE_BYTES: Final = 16_384
_CHECKPOINT_PAGES: Final = 1000
_NO_SPACE: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
_REFUSED: Final = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM})
_NOT_OPENED: Final = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR})
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_RESTORE: Final = "restore it with `mlcd restore`"
_ROWS_PER_QUERY: Final = 500
_FACTS: Final[dict[str, type | tuple[type, ...]]] = {
    "fingerprint": str,
    "dimension": int,
    "recall": (int, float),
}


@dataclass(frozen=True)
class StoredItem:
    """One item without its vector; metadata is JSON."""

    row: int
    id: str
    metadata: str


class Ledger:
    """One connection, opened at its first use. Not thread-safe."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path, self._read_only = path, read_only
        self._connected: sqlite3.Connection | None = None
        self._identity_at_rest: tuple[int, int] | None = None
        self._seal: Seal | None = None

    @property
    def _connection(self) -> sqlite3.Connection:
        """Returns the connection, and opens it if it is closed.

        Raises Unavailable if the file cannot be opened now, Conflict if it was replaced since the
        last connection.
        """
        if self._connected is None:
            identity = self._identity_at_rest
            if identity is not None and not self._path.is_file():  # SQLite would create a file
                raise self._report_replaced()
            connection = _connect_to_read(self._path) if self._read_only else _connect(self._path)
            if identity is not None and identity != _identity(self._path, connection):
                connection.close()
                raise self._report_replaced()
            self._connected = connection
        return self._connected

    def _report_replaced(self) -> Conflict:
        """Returns the error for a file that does not match the items in memory."""
        return Conflict(
            f"the ledger of {self._path.parent.name} was removed or replaced meanwhile",
            remedy="open the collection again",
        )

    @classmethod
    def create(cls, path: Path, facts: Mapping[str, Any]) -> "Ledger":
        ledger = cls(path)
        try:
            with _translate_errors(path):
                ledger._connection.executescript(_TABLES)
                ledger._connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                ledger._connection.execute(f"PRAGMA user_version = {SCHEMA}")
                encoded_facts = {name: json.dumps(value) for name, value in facts.items()}
                seal = Seal(facts=facts_checksum(encoded_facts))
                ledger._connection.execute("BEGIN IMMEDIATE")
                ledger._connection.executemany(
                    "INSERT INTO facts VALUES (?, ?)",
                    {**encoded_facts, SEAL: seal.to_json()}.items(),
                )
                ledger._connection.execute("COMMIT")
        except BaseException:
            ledger.close_until_used()
            raise
        return ledger

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> "Ledger":
        """Opens the ledger and verifies its pages; `items` verifies the checksums of their content.

        read_only: writes and creates no file in the folder; no other process may write the ledger
        meanwhile. Raises ArtifactInvalid if the file is damaged or not a ledger.
        """
        if not path.is_file():
            raise ArtifactInvalid(f"{path} is missing", remedy=_RESTORE)
        ledger = cls(path, read_only=read_only)
        try:
            ledger._check()
        except BaseException:
            ledger.close_until_used()
            raise
        return ledger

    def _check(self) -> None:
        with _translate_errors(self._path):
            application = self._pragma("application_id")
            version = self._pragma("user_version")
            if application != _APPLICATION:
                raise ArtifactInvalid(f"{self._path} is not a collection's ledger", remedy=_RESTORE)
            if version > SCHEMA:
                raise ArtifactInvalid(
                    f"{self._path} has schema {version}, newer than {SCHEMA}",
                    remedy="upgrade mlcd to read it",
                )
            if self._pragma("integrity_check(1)") != "ok":
                raise self._report_damage()
        self._seal = self._read_seal()
        if (self._seal is None) != (version < SCHEMA):
            raise self._report_damage()
        if self._seal is None and not self._read_only:
            self._add_seal()

    def _pragma(self, name: str) -> Any:
        return self._connection.execute(f"PRAGMA {name}").fetchone()[0]

    def _add_seal(self) -> None:
        """Upgrades a ledger of version 1, which lacks a seal."""
        seal = Seal(facts=facts_checksum(self._read_encoded_facts()), last_row=self._last_row())
        for item, vector_checksum in self._rows():
            seal.add(item.row, _checksum(item.id, item.metadata), vector_checksum)
        with _translate_errors(self._path):
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO facts VALUES (?, ?)", (SEAL, seal.to_json()))
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
            connection.execute("COMMIT")
        self._seal = seal

    def _report_damage(self) -> ArtifactInvalid:
        return ArtifactInvalid(f"{self._path} is damaged", remedy=_RESTORE)

    def close_until_used(self) -> None:
        """Closes the connection until the next use. SQLite then writes the log into the file and
        syncs it.
        """
        if self._connected is not None:
            with suppress(MlcdError, sqlite3.Error, OSError):
                self._identity_at_rest = _identity(self._path, self._connected)
            self._connected.close()
            self._connected = None

    def set_fact(self, name: str, value: Any) -> None:
        """Replaces the value of a fact; durable when it returns."""
        with self.transaction() as seal:
            self._connection.execute(
                "UPDATE facts SET value = ? WHERE name = ?", (json.dumps(value), name)
            )
            seal.facts = facts_checksum(self._read_encoded_facts())

    def facts(self) -> dict[str, Any]:
        """Returns the facts by name. Raises ArtifactInvalid if they are damaged."""
        encoded_facts = self._read_encoded_facts()
        seal = self._read_seal()
        if seal is not None and seal.facts != facts_checksum(encoded_facts):
            raise self._report_damage()
        try:
            facts = {name: json.loads(value) for name, value in encoded_facts.items()}
        except (ValueError, TypeError) as error:
            raise self._report_damage() from error
        if not all(isinstance(facts.get(name), kind) for name, kind in _FACTS.items()):
            raise self._report_damage()
        return facts

    def _read_encoded_facts(self) -> dict[str, str]:
        with _translate_errors(self._path):
            encoded_facts = dict(self._connection.execute("SELECT * FROM facts").fetchall())
        encoded_facts.pop(SEAL, None)
        return encoded_facts

    def _read_seal(self) -> Seal | None:
        """Returns the seal; None for a ledger of version 1."""
        with _translate_errors(self._path):
            row = self._connection.execute(
                "SELECT value FROM facts WHERE name = ?", (SEAL,)
            ).fetchone()
        try:
            return None if row is None else Seal.from_json(row[0])
        except (ValueError, TypeError) as error:
            raise self._report_damage() from error

    @contextmanager
    def transaction(self) -> Iterator[Seal]:
        """Runs the block as a transaction, durable when the block ends.

        Yields the seal, which `insert`, `describe` and `remove` update. Raises DiskFull.
        """
        with _translate_errors(self._path):
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._seal = seal = self._read_seal() or Seal()
                old_seal = seal.to_json()
                yield seal
                if (new_seal := seal.to_json()) != old_seal:
                    connection.execute(
                        "UPDATE facts SET value = ? WHERE name = ?", (new_seal, SEAL)
                    )
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def find(self, item_id: str) -> StoredItem | None:
        row = self._connection.execute(
            "SELECT row, id, metadata FROM items WHERE id = ?", (item_id,)
        ).fetchone()
        return StoredItem(*row) if row else None

    def insert(self, item_id: str, vector: Embeddings, metadata: str) -> int:
        """Inserts an item and returns the new row's number."""
        assert self._seal is not None
        checksum = _checksum(item_id, metadata)
        cursor = self._connection.execute(
            "INSERT INTO items (id, metadata, checksum) VALUES (?, ?, ?)",
            (item_id, metadata, checksum),
        )
        row = cursor.lastrowid
        assert row is not None
        blob = vector.astype("<f4", copy=False).tobytes()
        vector_checksum = zlib.crc32(blob)
        self._connection.execute(
            "INSERT INTO vectors VALUES (?, ?, ?)", (row, blob, vector_checksum)
        )
        self._seal.add(row, checksum, vector_checksum)
        self._seal.last_row = row
        return row

    def describe(self, item: StoredItem, metadata: str) -> None:
        """Replaces the metadata of an item; its row stays."""
        assert self._seal is not None
        vector_checksum = self._connection.execute(
            "SELECT checksum FROM vectors WHERE row = ?", (item.row,)
        ).fetchone()[0]
        checksum = _checksum(item.id, metadata)
        self._connection.execute(
            "UPDATE items SET metadata = ?, checksum = ? WHERE row = ?",
            (metadata, checksum, item.row),
        )
        self._seal.remove(item.row, _checksum(item.id, item.metadata), vector_checksum)
        self._seal.add(item.row, checksum, vector_checksum)

    def remove(self, row: int) -> None:
        assert self._seal is not None
        checksums = [
            self._connection.execute(
                f"DELETE FROM {table} WHERE row = ? RETURNING checksum",  # noqa: S608
                (row,),
            ).fetchone()[0]
            for table in ("items", "vectors")
        ]
        self._seal.remove(row, *checksums)

    def items(self) -> Iterator[StoredItem]:
        """Yields all items, by ascending row.

        Raises ArtifactInvalid naming the first damaged item, and after the last item if the items
        do not match the seal.
        """
        counted = Seal(last_row=self._last_row())
        for item, vector_checksum in self._rows():
            counted.add(item.row, _checksum(item.id, item.metadata), vector_checksum)
            yield item
        seal = self._read_seal()
        if seal is None:
            return
        if seal.items != counted.items:
            raise ArtifactInvalid(
                f"{self._path.parent}: its ledger must contain {seal.items:,} items, got"
                f" {counted.items:,}",
                remedy=f"a copy made while it was written? {_RESTORE}",
            )
        if (seal.rows, seal.last_row) != (counted.rows, counted.last_row):
            raise ArtifactInvalid(
                f"{self._path.parent}: the items of its ledger do not match its seal",
                remedy=f"a copy made while it was written? {_RESTORE}",
            )

    def _rows(self) -> Iterator[tuple[StoredItem, int]]:
        """Yields each item with the checksum of its vector, by ascending row.

        Raises ArtifactInvalid naming the first row that is damaged, or lacks an item or a vector.
        """
        with _translate_errors(self._path):
            items = self._connection.execute("SELECT * FROM items ORDER BY row")
            vectors = self._connection.execute("SELECT row, checksum FROM vectors ORDER BY row")
            for item, vector in zip_longest(items, vectors):
                row = (item or vector)[0]
                if item is None or vector is None or vector[0] != row or not _is_whole(item):
                    raise ArtifactInvalid(f"item {row} of {self._path} is damaged", remedy=_RESTORE)
                yield StoredItem(*item[:3]), vector[1]

    def _last_row(self) -> int:
        """Returns the highest row number ever used, 0 if none was."""
        with _translate_errors(self._path):
            row = self._connection.execute("SELECT max(seq) FROM sqlite_sequence").fetchone()
        return row[0] or 0

    def vectors(self, rows: Sequence[int] | NDArray[np.int64], dimension: int) -> Embeddings:
        """Returns the vectors of the rows, [len(rows), dimension] float32, in this order.

        Raises ArtifactInvalid naming the first damaged vector.
        """
        vectors = np.empty((len(rows), dimension), dtype=np.float32)
        with _translate_errors(self._path):
            for start in range(0, len(rows), _ROWS_PER_QUERY):
                part = [int(row) for row in rows[start : start + _ROWS_PER_QUERY]]
                placeholders = ",".join("?" * len(part))
                columns = "row, vector, checksum"
                query = f"SELECT {columns} FROM vectors WHERE row IN ({placeholders})"  # noqa: S608
                blobs = {
                    row: (blob, checksum)
                    for row, blob, checksum in self._connection.execute(query, part)
                }
                for index, row in enumerate(part, start):
                    blob, checksum = blobs.get(row, (b"", 0))
                    is_whole = isinstance(blob, bytes) and len(blob) == 4 * dimension
                    if not is_whole or zlib.crc32(blob) != checksum:
                        raise ArtifactInvalid(
                            f"the vector of item {row} of {self._path} is damaged",
                            remedy=_RESTORE,
                        )
                    vectors[index] = np.frombuffer(blob, dtype="<f4")
        return vectors


def _connect(path: Path) -> sqlite3.Connection:
    with _translate_errors(path):
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            # The page size applies to a new file only.
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

    After a clean close the file is complete, so SQLite opens it as immutable. After a crash the log
    is part of the database, and SQLite reads it in place.
    """
    log = path.with_name(f"{path.name}-wal")
    mode = "mode=ro" if log.is_file() and log.stat().st_size else "immutable=1"
    with _translate_errors(path):
        return sqlite3.connect(
            f"{path.resolve().as_uri()}?{mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )


def _identity(path: Path, connection: sqlite3.Connection) -> tuple[int, int]:
    """Returns the file's inode number and its highest row number ever used: a replacement file may
    get the same inode number.
    """
    with _translate_errors(path):
        last_row = connection.execute("SELECT max(seq) FROM sqlite_sequence").fetchone()[0]
    return path.stat().st_ino, last_row or 0


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter: a damaged table definition
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code
        if code in _NOT_OPENED and lacks_open_files():
            raise too_many_files() from error
        if code in _NO_SPACE:
            raise DiskFull(
                f"{path} cannot be written: the disk is full or fails",
                remedy="free space and send the request again; what was acknowledged before is"
                " kept",
            ) from error
        if code in _REFUSED:
            raise Unavailable(
                f"{path} cannot be written", remedy="give a writable folder"
            ) from error
        if code in _BUSY:
            raise Unavailable(
                f"{path} is in use by another process", remedy="try again later"
            ) from error
        # Every other error means damage: of a page, a table definition, or text of a row.
        raise ArtifactInvalid(f"{path} is damaged", remedy=_RESTORE) from error


def _is_whole(item: tuple[object, object, object, object]) -> bool:
    _, item_id, metadata, checksum = item
    return (
        isinstance(item_id, str)
        and isinstance(metadata, str)
        and checksum == _checksum(item_id, metadata)
    )


def _checksum(item_id: str, metadata: str) -> int:
    return zlib.crc32(metadata.encode(), zlib.crc32(item_id.encode()))
