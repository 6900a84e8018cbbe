"""A directory for work that others can take away.

A process that was thought dead and is not finds its directory gone and leaves nothing behind.
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
    """A new directory in `folder`, the only one of its kind there; the remains of earlier attempts
    are removed.

    It is removed at the end, with its contents. A process that is still at an earlier attempt gets
    a Conflict; if the folder was removed meanwhile, nothing of it comes back.
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
        """Raises Conflict where the directory was taken away, even if another process has made its
        folders again.
        """
        if not self._stands():
            raise self._conflict()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, OSError | MlcdError) and not self._stands():
                raise self._conflict() from error
        finally:
            os.close(self._descriptor)
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # a folder in use is not empty
                self._folder.rmdir()

    def _conflict(self) -> Conflict:
        return Conflict(f"{self.path} was removed meanwhile", remedy="see who else is at this work")

    def _stands(self) -> bool:
        # The open descriptor keeps the inode number from being given to another directory.
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False


def _remove(path: Path) -> None:
    """Hides the directory by one rename before any file in it goes, so that its user cannot publish
    half of it.
    """
    hidden = path.with_name(f"{_PREFIX}{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
