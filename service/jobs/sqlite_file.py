"""The file of a queue in SQLite: one connection that writes, one that reads, and whether the file is still that one.

Write-ahead log: who reads never waits for who writes. synchronous=FULL: a transaction has reached the disk when COMMIT
returns.
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

_LOOK_S: Final = 0.5
"""Within SQLite no signal is heard: it waits for so long, and is asked again."""
_PATIENCE_S: Final = 3.0
"""For a turn to write, which each process has for milliseconds."""
_TELL_EVERY_S: Final = 60.0
"""Where the file is and what SQLite calls its fault: clients are not told, and requests must not fill a log."""
_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_Answer = TypeVar("_Answer")
_log = logging.getLogger("mlcd.jobs")


class EmbeddedFile:
    """Threads may share it. Raises Unavailable, and ArtifactInvalid for a file that is damaged."""

    def __init__(self, path: Path, prepare: Callable[[sqlite3.Connection], None]) -> None:
        """prepare: makes or checks what is in the file, as often as it is asked to."""
        self._path = path
        self._told_s: float | None = None
        with self._translated():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = _Connection(path, prepare)
            self._reader = _Connection(path, prepare)

    def rows(self, query: str, *values: object) -> list[Any]:
        with self._translated(), self._reader.opened() as reader:
            return _patiently(lambda: reader.execute(query, values).fetchall())

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, of which nothing is kept where it raises."""
        with self._translated(), self._writer.opened() as writer:
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
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            self._tell(error)
            raise Unavailable(
                "the job queue was removed",
                remedy="put it back; or end all servers and workers and start them with an empty one",
            ) from None
        except (sqlite3.Error, OSError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:  # without the details
                raise ArtifactInvalid(f"{self._path} is damaged", remedy="restore it, or move it away") from error
            self._tell(error)
            raise Unavailable(
                "the job queue cannot be read or written now",
                remedy="is there space, and may the server write there? its log says where",
            ) from error

    def _tell(self, error: Exception) -> None:
        """Now and then."""
        if self._told_s is None or time.monotonic() - self._told_s >= _TELL_EVERY_S:
            self._told_s = time.monotonic()
            fault = getattr(error, "sqlite_errorname", type(error).__name__)
            _log.warning("the job queue at %s cannot be read or written: %s", self._path, fault)


class _Connection:
    """For one thread at a time, and always to the file that is at the path now."""

    def __init__(self, path: Path, prepare: Callable[[sqlite3.Connection], None]) -> None:
        self._path, self._prepare = path, prepare
        self._turn = threading.Lock()
        self._open()

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        if not self._turn.acquire(timeout=_PATIENCE_S):
            raise Unavailable("the job queue is busy", remedy="come back soon")
        try:
            self._follow()
            yield self._connection
        finally:
            self._turn.release()

    def close(self) -> None:
        with self._turn:
            self._connection.close()

    def _open(self) -> None:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=_LOOK_S)
        try:
            _patiently(lambda: self._prepare(connection))
            self._file = _identity(self._path)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _follow(self) -> None:
        """Where the file was replaced, as by a copy that was kept.

        Raises FileNotFoundError where it was removed: nobody else would see a word.
        """
        if _identity(self._path) != self._file:
            before = self._connection
            self._open()
            before.close()


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _patiently(call: Callable[[], _Answer]) -> _Answer:
    """Asked again while another process writes; between two times signals are heard."""
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return call()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in _BUSY or time.monotonic() > until_s:
                raise
