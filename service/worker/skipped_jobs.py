"""The jobs that a worker leaves to other workers."""

import logging
import time
from collections.abc import Set as AbstractSet
from typing import Final

from mlcd.errors import NotFound
from mlcd.service.jobs.job import Stage, Work
from mlcd.service.jobs.queue import Queue
from mlcd.service.timings import FOREIGN_JOBS_POLL_S, LEFT_JOBS_POLL_S
from mlcd.types import Fingerprint

_MAX_COUNTED: Final = 100  # foreign jobs
_log = logging.getLogger("mlcd.jobs")


class LeftJobs:
    """The jobs of this model that the worker cannot do, each with the stage of its task."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._stages: dict[str, Stage] = {}
        self._check_due_s = 0.0

    @property
    def ids(self) -> AbstractSet[str]:
        return self._stages.keys()

    def add(self, work: Work) -> None:
        self._stages[work.job_id] = work.stage

    def drop_canceled(self) -> None:
        """Removes jobs that were canceled from the list: any worker may remove their output, and
        they may be retried.
        """
        if self._stages and time.monotonic() >= self._check_due_s:
            self._check_due_s = time.monotonic() + LEFT_JOBS_POLL_S
            self._stages = {
                job_id: stage
                for job_id, stage in self._stages.items()
                if self._stays(job_id, stage)
            }

    def _stays(self, job_id: str, stage: Stage) -> bool:
        try:
            job = self._queue.get(job_id)
        except NotFound:
            return False
        return job.state == "running" or stage == job.stage == "discard"


class ForeignJobs:
    """The queued jobs of other models than this worker's."""

    def __init__(self, queue: Queue, fingerprint: Fingerprint) -> None:
        self._queue, self._fingerprint = queue, fingerprint
        self._look_due_s = 0.0
        self._logged = False

    @property
    def is_look_due(self) -> bool:
        return time.monotonic() >= self._look_due_s

    def look(self) -> None:
        """Logs a warning once while such jobs wait."""
        self._look_due_s = time.monotonic() + FOREIGN_JOBS_POLL_S
        page = self._queue.page(limit=_MAX_COUNTED, state="queued")
        num = sum(job.spec.fingerprint != self._fingerprint for job in page.jobs)
        if num and not self._logged:
            qualifier = "" if page.cursor is None else "at least "
            _log.warning("%s%d jobs wait for workers with other models", qualifier, num)
        self._logged = num > 0
