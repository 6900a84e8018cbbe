"""The pauses between the attempts at something that fails for a while."""

import random


class Backoff:
    """Pauses that double from `first_s` to `most_s`."""

    def __init__(
        self, first_s: float, most_s: float, *, at_once: bool = False, jitter_s: float = 0.0
    ) -> None:
        """at_once: a pause of 0 comes before the first. jitter_s: the most by which a pause is
        longer at random, and never by more than itself.
        """
        self._first_s, self._most_s = first_s, most_s
        self._at_once, self._jitter_s = at_once, jitter_s
        self.reset()

    def reset(self) -> None:
        """Begins anew, after a success."""
        self._pause_s = 0.0 if self._at_once else self._first_s

    def next_s(self, *, at_least: float = 0.0) -> float:
        """Returns the seconds to wait now; the next call returns more."""
        pause_s = max(self._pause_s, at_least)
        self._pause_s = min(self._most_s, max(self._first_s, 2 * self._pause_s))
        # it spreads load and hides nothing
        return pause_s + random.random() * min(pause_s, self._jitter_s)  # noqa: S311
