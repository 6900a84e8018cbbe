"""To a queue that may be away for a while."""

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from mlcd.errors import Unavailable

_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 10.0
_Answer = TypeVar("_Answer")
_log = logging.getLogger("mlcd.jobs")


class Link:
    """Says once that the queue is away, and once that it is back."""

    def __init__(self) -> None:
        self.up = True
        self.wait_s = 0.0
        """Before the next question: ever longer while it is away."""

    def once(self, call: Callable[[], _Answer]) -> _Answer | None:
        """The answer, None where there was none."""
        try:
            answer = call()
        except Unavailable as error:
            if self.up:
                _log.warning("the job queue is away, trying again: %s", error.message)
            self.up, self.wait_s = False, min(max(2 * self.wait_s, _FIRST_WAIT_S), _LONGEST_WAIT_S)
            return None
        if not self.up:
            _log.warning("the job queue is back")
        self.up, self.wait_s = True, 0.0
        return answer
