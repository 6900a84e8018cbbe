"""A place to build in that others can take away: who was thought dead, and is not, finds it gone
and leaves nothing.
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
    """A new directory in `folder`, and the only one of its kind there: what earlier attempts left
    is removed.

    Gone at the end, with what is in it. Whoever is still at an earlier one is told by a Conflict,
    and if the folder was removed meanwhile, nothing of it comes back.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / f"{_PREFIX}{secrets.token_hex(4)}"
        self._descriptor = -1

    def __enter__(self) -> Self:
        for other in list(self._folder.glob(f"{_PREFIX}*")):
            _remove(other)
        try:
            self.path.mkdir()
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError as error:
            raise self._gone() from error
        return self

    def check(self) -> None:
        """Raises Conflict where it was taken away, even if somebody has made its folders again."""
        if not self._stands():
            raise self._gone()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, OSError | MlcdError) and not self._stands():
                raise self._gone() from error
        finally:
            os.close(self._descriptor)
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # one in use is not empty
                self._folder.rmdir()

    def _gone(self) -> Conflict:
        return Conflict(f"{self.path} was removed meanwhile", remedy="see who else is at this work")

    def _stands(self) -> bool:
        # The open descriptor keeps its number from being given to another directory.
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False


def _remove(path: Path) -> None:
    """By one rename, before anything in it goes: who is at it must not publish a half."""
    gone = path.with_name(f"{_PREFIX}{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
