"""The claims of processes on the parts of a draft."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_NAME: Final = ".claims"


class Claims:
    """A lock for each part of the draft in `folder`; the operating system releases a dead process's
    locks at once.

    A part's lock is a POSIX lock on one byte of a shared file. POSIX locks belong to the process,
    so use one `Claims` per process.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._descriptor = -1

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    @contextmanager
    def hold(self, part: int, *, wait: bool) -> Iterator[bool]:
        """Yields whether this process has locked the part. With `wait`, blocks until the holder
        releases the lock or dies.
        """
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, part)
        except (BlockingIOError, PermissionError):  # POSIX allows either error
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, part)
