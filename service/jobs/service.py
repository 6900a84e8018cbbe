"""The job service of a server: the queue, the folders that jobs may use, and threads for the
queue's blocking calls.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, get_args

from mlcd.errors import (
    ArtifactInvalid,
    ConfigInvalid,
    DeadlineExceeded,
    MlcdError,
    Unavailable,
)
from mlcd.service.errors import RecordDamaged
from mlcd.service.jobs.files import folder_of_files
from mlcd.service.jobs.job import JobState, QueueStats
from mlcd.service.jobs.queue import Queue
from mlcd.service.jobs.roots import Roots
from mlcd.service.jobs.sqlite import SqliteDatabase
from mlcd.service.settings import Settings
from mlcd.service.telemetry.metrics import Metrics
from mlcd.service.timings import DAY_S, JOBS_COUNT_S

_Result = TypeVar("_Result")
_THREADS: Final = 4
_log = logging.getLogger("mlcd.jobs")
_FILE: Final = Path("jobs") / "queue.sqlite"


@dataclass(frozen=True)
class JobService:
    """The parts that the routes of jobs use. Use it from one event loop."""

    queue: Queue
    roots: Roots
    threads: ThreadPoolExecutor
    keep_s: float
    keep_jobs: int

    async def ask(self, call: Callable[[], _Result], *, deadline: float) -> _Result:
        """Returns what `call` returns, from a thread. Raises DeadlineExceeded once the loop's clock
        passes `deadline`, Unavailable for a queue that is damaged as a whole.
        """
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.get_running_loop().run_in_executor(self.threads, call)
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the job queue did not answer in time", remedy="ask again"
            ) from error
        except RecordDamaged:
            raise
        except ArtifactInvalid as error:
            _log.error("a request about jobs is refused: %s", error)
            raise Unavailable(
                "the server's job queue is damaged", remedy="its log says how to mend it"
            ) from error

    async def count(self, metrics: Metrics) -> None:
        """Removes jobs that ended long ago and publishes the queue's numbers, until cancelled.

        While the queue does not answer, the last numbers stand.
        """
        while True:
            try:
                stats, workers = await asyncio.get_running_loop().run_in_executor(
                    self.threads, self._count
                )
            except MlcdError:
                metrics.job_queue_up(up=False)
            else:
                metrics.job_queue_up(up=True)
                metrics.jobs(
                    {state: stats.jobs.get(state, 0) for state in get_args(JobState)},
                    depth=stats.depth,
                    oldest_wait_s=stats.oldest_wait_s,
                    num_workers=len(workers),
                )
            await asyncio.sleep(JOBS_COUNT_S)

    def _count(self) -> tuple[QueueStats, list[str]]:
        self.queue.sweep(max_age_s=self.keep_s, max_jobs=self.keep_jobs)
        self.queue.note_served()
        return self.queue.stats(), self.queue.workers()


@asynccontextmanager
async def open_job_service(settings: Settings) -> AsyncIterator[JobService | None]:
    """Opens the job service; None where no folders are named, as jobs are off then. Raises
    ConfigInvalid.
    """
    if not settings.jobs.roots:
        yield None
        return
    with open_jobs(settings, defer_errors=True) as (queue, roots):
        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="jobs")
        try:
            yield JobService(
                queue, roots, threads, settings.jobs.keep_days * DAY_S, settings.jobs.keep_jobs
            )
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def open_jobs(settings: Settings, *, defer_errors: bool = False) -> Iterator[tuple[Queue, Roots]]:
    """Opens the queue and the folders that jobs may use. Raises ConfigInvalid.

    defer_errors: see `open_queue`.
    """
    roots = Roots(
        settings.jobs.roots, settings.fetch.url_options, private=folder_of_files(settings)
    )
    with closing(open_queue(settings, defer_errors=defer_errors)) as queue:
        yield queue, roots


def open_queue(settings: Settings, *, defer_errors: bool = False) -> Queue:
    """Opens the queue in Redis, or else in the state directory. Raises ConfigInvalid if neither
    is set.

    defer_errors: raise for a damaged file in each call, until it is repaired, instead of here.
    """
    if settings.redis_url is not None:
        from mlcd.service.jobs.redis import open_redis_database

        return Queue(
            open_redis_database(settings.redis_url.get_secret_value(), settings.jobs.redis_prefix)
        )
    if settings.state_dir is None:
        raise ConfigInvalid(
            "jobs need a place to be stored", remedy="set MLCD_STATE_DIR or MLCD_REDIS_URL"
        )
    return Queue(SqliteDatabase(Path(settings.state_dir) / _FILE, defer_errors=defer_errors))
