"""Which process makes which part of a draft."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_NAME: Final = ".claims"


class Claims:
    """A lock for each part of the draft in `folder`; the operating system frees those of a dead
    process at once.

    One byte of one file for each part, by the locks of POSIX: they belong to the process, so use
    one `Claims` in each.
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
        """Whether the part is ours; with `wait` it is, as soon as whoever holds it is done or dead."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, part)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, part)
