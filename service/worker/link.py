"""To a queue that may be away for a while."""

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

from mlcd.errors import Unavailable

_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 10.0
_SETTLED_S: Final = 30.0
"""Without a failure, before it counts as back: a full disk lets through what only reads."""
_Answer = TypeVar("_Answer")
_log = logging.getLogger("mlcd.jobs")


class Link:
    """Says once that the queue is away, and once that it is back."""

    def __init__(self) -> None:
        self.up = True
        self.wait_s = 0.0
        """Before the next question: ever longer while it is away."""

        self._pause_s = 0.0
        """The last of these."""
        self._away_s: float | None = None
        """When it last did not answer; None once it is back."""

    def once(self, call: Callable[[], _Answer]) -> _Answer | None:
        """The answer, None where there was none."""
        try:
            answer = call()
        except Unavailable as error:
            if self._away_s is None:
                _log.warning("the job queue is away, trying again: %s", error.message)
            self._away_s = time.monotonic()
            self._pause_s = min(max(2 * self._pause_s, _FIRST_WAIT_S), _LONGEST_WAIT_S)
            self.up, self.wait_s = False, self._pause_s
            return None
        if self._away_s is not None and time.monotonic() - self._away_s >= _SETTLED_S:
            _log.warning("the job queue is back")
            self._away_s, self._pause_s = None, 0.0
        self.up, self.wait_s = True, 0.0
        return answer
