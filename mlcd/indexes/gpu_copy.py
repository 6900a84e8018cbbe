"""Data that a GPU holds a copy of while its memory suffices; else the CPU searches."""

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
_log = logging.getLogger("mlcd.collections")
_Copy = TypeVar("_Copy")
_Result = TypeVar("_Result")


class GpuCopy(Generic[_Copy]):
    """A copy on a GPU, made by the first search that finds memory for it. Thread-safe."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._making = threading.Lock()
        self._copy: _Copy | None = None
        self._retry_at = -float("inf")
        self._warned = False

    @property
    def exists(self) -> bool:
        return self._copy is not None

    def use(
        self, make: Callable[[], _Copy], num_bytes: int, search: Callable[[_Copy], _Result]
    ) -> _Result | None:
        """Returns `search(copy)`; None if the CPU has to search, because `num_bytes`, which the
        copy and its searches take, are not free, the GPU failed, or another thread is copying.
        """
        try:
            copy = self._copy
            if copy is None:
                copy = self._try_to_make(make, num_bytes)
            return None if copy is None else search(copy)
        except (MemoryError, RuntimeError) as error:  # no memory, or the GPU failed
            self._give_up(str(error).partition("\n")[0])
            return None

    def _try_to_make(self, make: Callable[[], _Copy], num_bytes: int) -> _Copy | None:
        if time.monotonic() < self._retry_at or not self._making.acquire(blocking=False):
            return None
        try:
            if self._copy is not None:  # made since it was looked for
                return self._copy
            available = int(_FREE_SHARE * free_bytes())
            if num_bytes > available:
                self._give_up(f"{num_bytes:,} bytes are needed, {available:,} may be taken")
                return None
            self._copy = make()
            return self._copy
        finally:
            self._making.release()

    def _give_up(self, reason: str) -> None:
        """Frees the copy, and leaves searches to the CPU for a while; logs the first time."""
        self._copy, self._retry_at = None, time.monotonic() + _RETRY_S
        if not self._warned:
            _log.warning("%s are searched on the CPU, not on the GPU: %s", self._what, reason)
        self._warned = True


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
