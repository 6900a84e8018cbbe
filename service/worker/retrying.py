"""The case of a queue that is away: the worker tries again, less and less often."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from mlcd.backoff import Backoff
from mlcd.errors import Unavailable
from service.timings import QUEUE_FIRST_WAIT_S, QUEUE_LONGEST_WAIT_S, QUEUE_SETTLED_S

_Answer = TypeVar("_Answer")
_log = logging.getLogger("mlcd.jobs")


class RetryingQueue:
    """Calls of the queue that may be away; logs once that it is, and once that it is back."""

    def __init__(self) -> None:
        self.up = True
        self.wait_s = 0.0  # seconds before the next call, longer each time while the queue is away

        self._backoff = Backoff(QUEUE_FIRST_WAIT_S, QUEUE_LONGEST_WAIT_S)
        self._away_s: float | None = None  # when it last did not answer; None once it is back

    def once(self, call: Callable[[], _Answer]) -> _Answer | None:
        """Calls the queue; returns None where it did not answer."""
        try:
            answer = call()
        except Unavailable as error:
            if self._away_s is None:
                _log.warning("the job queue is away, trying again: %s", error.message)
            self._away_s = time.monotonic()
            self.up, self.wait_s = False, self._backoff.next_s()
            return None
        if self._away_s is not None and time.monotonic() - self._away_s >= QUEUE_SETTLED_S:
            _log.warning("the job queue is back")
            self._away_s = None
            self._backoff.reset()
        self.up, self.wait_s = True, 0.0
        return answer
