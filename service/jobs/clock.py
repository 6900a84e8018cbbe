"""Lets a queue survive that its clock is set, forward or back.

A jump forward ends leases early: they do not count as lost. A jump back makes leases and pauses
seem to end late: such jobs are tried too, and each time is cut back to its length from now.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from mlcd.service.jobs.job import StoredJob
from mlcd.service.timings import CLOCK_MARGIN_S, CLOCK_TOLERANCE_S, LONGEST_PAUSE_S

# Number of jobs that a claim also tries although they seem due implausibly late: the clock must
# have been set back.
MAX_LATE_DUE: Final = 4


class Clock:
    """A clock that notices when it was set. Threads may share it."""

    def __init__(self, read: Callable[[], float]) -> None:
        """read: seconds since the epoch."""
        self._read = read
        self._turn = threading.Lock()
        self._last: tuple[float, float, float] | None = None
        self._jumped_at_s: float | None = None

    def now_s(self) -> float:
        before_s = time.monotonic()
        now_s = self._read()
        after_s = time.monotonic()
        with self._turn:
            if self._last is not None:
                last_before_s, last_s, last_after_s = self._last
                shortest_s, longest_s = before_s - last_after_s, after_s - last_before_s
                if (
                    not shortest_s - CLOCK_TOLERANCE_S
                    <= now_s - last_s
                    <= longest_s + CLOCK_TOLERANCE_S
                ):
                    self._jumped_at_s = after_s
            self._last = before_s, now_s, after_s
        return now_s

    def has_clock_jumped(self, *, within_s: float) -> bool:
        """Returns whether the clock was set in the last within_s seconds of a monotonic clock."""
        with self._turn:
            return (
                self._jumped_at_s is not None and time.monotonic() - self._jumped_at_s <= within_s
            )


def latest_due_s(now_s: float, lease_s: float) -> float:
    """Returns the latest end of a lease or a pause that starts now."""
    return now_s + max(lease_s, LONGEST_PAUSE_S) + CLOCK_MARGIN_S


def cut_back(record: StoredJob, *, now_s: float, lease_s: float) -> StoredJob:
    """Shortens leases and pauses to their length from now: the clock may have been set back."""
    leases = {
        name: replace(lease, until_s=min(lease.until_s, now_s + (lease.lease_s or lease_s)))
        for name, lease in record.leases.items()
    }
    retry_at = {
        task: min(until_s, now_s + LONGEST_PAUSE_S) for task, until_s in record.retry_at.items()
    }
    return replace(record, leases=leases, retry_at=retry_at)
