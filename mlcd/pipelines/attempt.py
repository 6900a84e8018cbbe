"""A directory of unfinished work that another process may remove.

If a process was wrongly taken for dead, it finds its directory removed and leaves nothing behind.
"""

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from mlcd.errors import Conflict, MlcdError

_PREFIX: Final = "attempt-"


class Attempt:
    """A new directory in `folder`. Entering removes the directories of earlier attempts.

    The directory is removed at the end, with its contents. A process that still works in an earlier
    attempt gets a Conflict. If `folder` was removed meanwhile, it is not created again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / f"{_PREFIX}{secrets.token_hex(4)}"
        self._descriptor = -1

    def __enter__(self) -> Self:
        for leftover in list(self._folder.glob(f"{_PREFIX}*")):
            _remove(leftover)
        try:
            self.path.mkdir()
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError as error:
            raise self._conflict() from error
        return self

    def check(self) -> None:
        """Raises Conflict if the directory was removed, even if another process created `folder`
        again.
        """
        if not self._exists():
            raise self._conflict()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, OSError | MlcdError) and not self._exists():
                raise self._conflict() from error
        finally:
            os.close(self._descriptor)
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # a folder in use is not empty
                self._folder.rmdir()

    def _conflict(self) -> Conflict:
        return Conflict(
            f"{self.path} was removed meanwhile",
            remedy="check which other process does the same work",
        )

    def _exists(self) -> bool:
        # The open descriptor keeps the inode number from being given to another directory.
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False


def _remove(path: Path) -> None:
    """Renames the directory before removing its files, so that its owner cannot publish a part of
    them.
    """
    hidden = path.with_name(f"{_PREFIX}{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
