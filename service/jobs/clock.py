"""A clock that tells the moments of a queue, and that may be set while it does."""

import threading
import time
from collections.abc import Callable
from typing import Final

_TOLERANCE_S: Final = 2.0
"""More than a clock is ever slewed between two looks at it."""


class Clock:
    """Threads may share it."""

    def __init__(self, read: Callable[[], float]) -> None:
        """read: seconds since the epoch."""
        self._read = read
        self._turn = threading.Lock()
        self._last: tuple[float, float, float] | None = None
        self._leapt_at_s: float | None = None

    def now_s(self) -> float:
        before_s = time.monotonic()
        now_s = self._read()
        after_s = time.monotonic()
        with self._turn:
            if self._last is not None:
                last_before_s, last_s, last_after_s = self._last
                shortest_s, longest_s = before_s - last_after_s, after_s - last_before_s
                if not shortest_s - _TOLERANCE_S <= now_s - last_s <= longest_s + _TOLERANCE_S:
                    self._leapt_at_s = after_s
            self._last = before_s, now_s, after_s
        return now_s

    def leapt(self, *, within_s: float) -> bool:
        """Whether it was seen to be set, either way, in so many seconds of a steady clock."""
        with self._turn:
            return self._leapt_at_s is not None and time.monotonic() - self._leapt_at_s <= within_s
