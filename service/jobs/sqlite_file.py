"""An SQLite file that other processes write to, and that may be removed, replaced or damaged.

A call waits while another process writes.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from mlcd.errors import ArtifactInvalid, Unavailable
from mlcd.service.timings import SQLITE_LOG_S, SQLITE_TURN_S, SQLITE_WAIT_S

_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
RESTORE: Final = "restore it by `mlcd restore`, or move it away"
_Answer = TypeVar("_Answer")
_log = logging.getLogger("mlcd.jobs")


class SqliteFile:
    """An SQLite file. Threads may share it. Raises Unavailable, and ArtifactInvalid for a damaged
    file.
    """

    def __init__(
        self,
        path: Path,
        prepare: Callable[[sqlite3.Connection], None],
        *,
        defer_errors: bool = False,
        name: str = "the job queue",
    ) -> None:
        """prepare: creates or checks the tables of the file; it may run more than once.
        defer_errors: log that the file cannot be used; each call then raises the error. name: name
        of the file in errors.
        """
        self._path, self._name = path, name
        self._logged_s: float | None = None
        self._writer, self._reader = _Connection(path, prepare), _Connection(path, prepare)
        try:
            with self._translate_errors():
                path.parent.mkdir(parents=True, exist_ok=True)
                for connection in (self._writer, self._reader):
                    with connection.use():
                        pass
        except (ArtifactInvalid, Unavailable) as error:
            self.close()
            if not defer_errors:
                raise
            _log.error("%s is out of use: %s", name, error)

    def rows(self, query: str, *values: object) -> list[Any]:
        with self._translate_errors(), self._reader.use() as reader:
            return _patiently(lambda: reader.execute(query, values).fetchall())

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Runs a transaction; nothing is written if it raises."""
        with self._translate_errors(), self._writer.use() as writer:
            _patiently(lambda: writer.execute("BEGIN IMMEDIATE"))
            try:
                yield writer
                writer.execute("COMMIT")
            except BaseException:
                if writer.in_transaction:
                    writer.execute("ROLLBACK")
                raise

    def close(self) -> None:
        self._writer.close()
        self._reader.close()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            self._log_error(error)
            raise Unavailable(
                f"{self._name} was removed or replaced",
                remedy="restart all servers and workers that use it",
            ) from None
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the details
            if code in _DAMAGED or isinstance(error, UnicodeDecodeError) or _is_not_text(error):
                raise ArtifactInvalid(f"{self._path} is damaged", remedy=RESTORE) from error
            self._log_error(error)
            raise Unavailable(
                f"{self._name} cannot be read or written now",
                remedy="check free space and write permission; the server's log has the path",
            ) from error

    def _log_error(self, error: Exception) -> None:
        """Logs an error, at most once in SQLITE_LOG_S seconds."""
        if self._logged_s is None or time.monotonic() - self._logged_s >= SQLITE_LOG_S:
            self._logged_s = time.monotonic()
            fault = getattr(error, "sqlite_errorname", type(error).__name__)
            _log.warning("%s at %s cannot be read or written: %s", self._name, self._path, fault)


class _Connection:
    """A connection to the file that was at the path at first use; one thread at a time uses it."""

    def __init__(self, path: Path, prepare: Callable[[sqlite3.Connection], None]) -> None:
        self._path, self._prepare = path, prepare
        self._turn = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    @contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        if not self._turn.acquire(timeout=SQLITE_TURN_S):
            raise Unavailable("the job queue is busy", remedy="come back soon")
        try:
            yield self._connect()
        finally:
            self._turn.release()

    def close(self) -> None:
        with self._turn:
            if self._connection is not None:
                self._connection.close()

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, isolation_level=None, check_same_thread=False, timeout=SQLITE_WAIT_S
        )
        try:
            _patiently(lambda: self._prepare(connection))
            self._file = _identify(self._path)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _connect(self) -> sqlite3.Connection:
        """Opens the file at the first call.

        Raises FileNotFoundError if the file was removed or replaced since then: other processes
        would not see what is written.
        """
        if self._connection is None:
            return self._open()
        if _identify(self._path) != self._file:
            raise FileNotFoundError(self._path)
        return self._connection


def _is_not_text(error: Exception) -> bool:
    """Tells whether SQLite read a text that is not UTF-8: only this error lacks a code."""
    return isinstance(error, sqlite3.OperationalError) and not hasattr(error, "sqlite_errorcode")


def _identify(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _patiently(call: Callable[[], _Answer]) -> _Answer:
    """Repeats a call while another process writes; signals are handled between two calls."""
    until_s = time.monotonic() + SQLITE_TURN_S
    while True:
        try:
            return call()
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # not-UTF-8 text has no code
            if code not in _BUSY or time.monotonic() > until_s:
                raise
