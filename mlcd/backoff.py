"""Pauses between retries of an operation that fails temporarily."""

import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


class Backoff:
    """Exponential backoff: pauses double from `first_s` to `most_s` seconds."""

    def __init__(
        self, first_s: float, most_s: float, *, at_once: bool = False, jitter_s: float = 0.0
    ) -> None:
        """at_once: the first pause is 0. jitter_s: upper bound of the random time added to a pause;
        it never more than doubles a pause.
        """
        self._first_s, self._most_s = first_s, most_s
        self._at_once, self._jitter_s = at_once, jitter_s
        self.reset()

    def reset(self) -> None:
        """Starts again with the first pause, after a success."""
        self._pause_s = 0.0 if self._at_once else self._first_s

    def next_s(self, *, at_least: float = 0.0) -> float:
        """Returns the seconds to wait now; the next pause is longer, up to `most_s`."""
        pause_s = max(self._pause_s, at_least)
        self._pause_s = min(self._most_s, max(self._first_s, 2 * self._pause_s))
        # jitter spreads load; it needs no secure randomness
        return pause_s + random.random() * min(pause_s, self._jitter_s)  # noqa: S311


def read_retry_after(header: str | None) -> float | None:
    """Returns the seconds of a Retry-After header (a number or a date); None if it has neither."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        retry_at = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (retry_at.astimezone(UTC) - datetime.now(UTC)).total_seconds())
