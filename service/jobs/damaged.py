"""The case of a job whose record cannot be read: the queue goes on with the others."""

import logging
import time

from service.timings import DAMAGED_REST_S

_log = logging.getLogger("mlcd.jobs")


class DamagedJobs:
    """The jobs that could not be read. Each is passed over for a while and then looked at again.

    Threads may share it.
    """

    def __init__(self) -> None:
        self._found_s: dict[str, float] = {}

    def add(self, job_id: str) -> None:
        """Passes over a job from now on; logs it the first time."""
        if job_id not in self._found_s:
            _log.error(
                "the record of job %s cannot be read: it is passed over; DELETE removes it", job_id
            )
        self._found_s[job_id] = time.monotonic()

    def forget(self, job_id: str) -> None:
        """Takes back that a job could not be read."""
        self._found_s.pop(job_id, None)

    def passed_over(self) -> set[str]:
        """Returns the jobs that are not looked at now."""
        since_s = time.monotonic() - DAMAGED_REST_S
        return {job_id for job_id, found_s in list(self._found_s.items()) if found_s > since_s}
