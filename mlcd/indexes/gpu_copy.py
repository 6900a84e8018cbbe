"""Data that a GPU holds a copy of while its memory suffices; else another searches."""

import logging
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Final, Generic, TypeVar

from mlcd.cores import has_gpu

# Share of the free memory that one copy may take: encoders need the rest.
_FREE_SHARE: Final = 0.8
_RETRY_S: Final = 60
_PATIENCE_S: Final = 1  # that a search waits for the copy before another takes it
_log = logging.getLogger("mlcd.collections")
_Copy = TypeVar("_Copy")
_Result = TypeVar("_Result")


class CannotServe(Exception):
    """A copy cannot serve, and is not made again."""


class GpuCopy(Generic[_Copy]):
    """A copy on a GPU, made by the first search that finds memory for it. Thread-safe."""

    def __init__(self, without: str, *, making: "threading.Lock | None" = None) -> None:
        """without: for the log, what happens until the copy is made. making: copies that share it
        are made one at a time; None lets this one be made beside all others.
        """
        self._without = without
        self._making = making or threading.Lock()
        self._copy: _Copy | None = None
        self._retry_at = -float("inf")
        self._warned = False

    @property
    def made(self) -> _Copy | None:
        """The copy; None until it is made, and after it failed."""
        return self._copy

    def use(
        self, make: Callable[[], _Copy], num_bytes: int, search: Callable[[_Copy], _Result]
    ) -> _Result | None:
        """Returns `search(copy)`; None if another has to search, because the copy is not ready,
        `num_bytes`, which it and its searches take, are not free, the GPU failed, or `make` or
        `search` raised CannotServe.
        """
        if (copy := self._copy or self._start(make, num_bytes)) is None:
            return None
        try:
            return search(copy)
        except (MemoryError, RuntimeError, CannotServe) as error:  # no memory, or the GPU failed
            self._give_up(error)
            return None

    def _start(self, make: Callable[[], _Copy], num_bytes: int) -> _Copy | None:
        """Starts to copy, unless another search did; returns the copy if it is ready soon."""
        if time.monotonic() >= self._retry_at and not self._making.locked():
            thread = threading.Thread(target=self.copy_now, args=(make, num_bytes), daemon=True)
            thread.start()
            thread.join(_PATIENCE_S)
        return self._copy

    def copy_now(self, make: Callable[[], _Copy], num_bytes: int) -> None:
        """Copies unless a copy is being made; returns once it is made or failed. Arguments: see
        `use`.
        """
        if not self._making.acquire(blocking=False):
            return
        try:
            if self._copy is None:
                _check_room(num_bytes)
                self._copy = make()
        except (MemoryError, RuntimeError, CannotServe) as error:
            self._give_up(error)
        finally:
            self._making.release()

    def _give_up(self, error: Exception) -> None:
        """Frees the copy, and leaves searches to another for a while; logs the first time."""
        retry_s = float("inf") if isinstance(error, CannotServe) else _RETRY_S
        self._copy, self._retry_at = None, time.monotonic() + retry_s
        if not self._warned:
            _log.warning("%s: %s", self._without, str(error).partition("\n")[0])
        self._warned = True


def _check_room(num_bytes: int) -> None:
    available = int(_FREE_SHARE * free_bytes())
    if num_bytes > available:
        raise MemoryError(f"{num_bytes:,} bytes are needed, {available:,} may be taken")


@cache
def find_gpu() -> str | None:
    """Returns torch's name of the GPU; None without a GPU or without torch."""
    if not has_gpu():
        return None
    try:
        from mlcd.indexes import device_rows
    except (ImportError, OSError):  # torch is not installed, or its libraries do not load
        return None
    return device_rows.find_gpu()


def free_bytes() -> int:
    """Returns the free memory of the GPU; without torch, which knows it, more than any has."""
    if find_gpu() is None:
        return 1 << 40
    from mlcd.indexes import device_rows

    return device_rows.free_bytes()
