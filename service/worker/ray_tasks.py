"""Tasks of jobs on a Ray cluster: each worker there runs shards by the runner of a local worker.

The queue knows nothing of it. This process leases the tasks, keeps their leases and reports them,
lists inputs and publishes; what is lost with a node is a task, and the queue's rules hold for it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from mlcd.errors import Unavailable
from mlcd.images.quiet import silence_decoders
from mlcd.parts.ray_session import (
    RayOptions,
    check_version,
    hide_gpus,
    raise_cause,
    ray_session,
    require_ray,
)
from mlcd.pipelines.resolve import model_everywhere
from mlcd.types import Fingerprint
from mlcd.version import __version__
from service.host.threads import limit_blas
from service.jobs.job import Work
from service.jobs.roots import Roots
from service.resources import opened_equipment
from service.settings import Auth, Settings, StoredCollections
from service.timings import RAY_ANSWER_S, RAY_LOOK_S, RAY_POLL_S, RAY_STOP_S
from service.worker.failures import EngineDown, Hung, Stopped, WorkerLost
from service.worker.task import Outcome, TaskRunner, Watch

_LOSSES: Final = 3  # of each worker in a row while they begin, before this process gives up
# calls that a worker answers at once: the task, and questions about it
_AT_ONCE: Final = 2


class TaskActor:
    """One process of the cluster, with a `TaskRunner` of its own in a thread of its own."""

    def __init__(self, settings: Settings, num_threads: int) -> None:
        self._settings, self._num_threads = settings, num_threads
        self._stack = ExitStack()
        self._computing = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._lease, self._watch = "", Watch(until_s=0.0)

    def open(self, version: str) -> None:
        """Opens the model here: not in the constructor, whose errors Ray wraps. version: that of
        the driver's mlcd.
        """
        check_version(version)
        silence_decoders()
        self._runner = self._computing.submit(self._opened).result()

    def _opened(self) -> TaskRunner:
        settings = self._settings
        hide_gpus(settings.jobs.ray_gpus)
        equipment = self._stack.enter_context(opened_equipment(settings))
        limit_blas(self._num_threads)
        roots = Roots(settings.jobs.roots, settings.fetch.url_options)
        return TaskRunner(equipment, roots, shard_images=settings.jobs.shard_images)

    def perform(self, work: Work, seconds: float) -> Outcome:
        """Does a task as `TaskRunner.perform`. seconds: those left of its lease."""
        watch = Watch(until_s=time.monotonic() + seconds)
        self._lease, self._watch = work.lease, watch
        return self._computing.submit(self._runner.perform, work, watch).result()

    def look(self, lease: str, seconds: float, *, stop: bool) -> tuple[int, float]:
        """Returns the images of a task so far, and for how long none was done though there are
        some to do. seconds: those left of its lease. stop: ends it between two images.
        """
        if lease != self._lease:
            return 0, 0.0
        watch, now_s = self._watch, time.monotonic()
        watch.until_s, watch.stop = now_s + seconds, watch.stop or stop
        moved_s = watch.moved_s
        return watch.done, 0.0 if moved_s is None else now_s - moved_s


class RayRunner:
    """The `Runner` protocol by workers on the connected cluster; other stages than shards are run
    here.
    """

    def __init__(
        self,
        ray: Any,
        options: RayOptions,
        settings: Settings,
        here: TaskRunner,
        computing: ThreadPoolExecutor,
        announce: Callable[[str], None],
    ) -> None:
        """computing: the thread of `here`. announce: called once where the cluster has no room."""
        self._ray, self._here, self._computing = ray, here, computing
        self._options, self._stall_s = options, settings.jobs.stall_s
        self._announce: Callable[[str], None] | None = announce
        self._hired = ray.remote(**options.demand, max_concurrency=_AT_ONCE)(TaskActor)
        self._arguments = settings, options.num_threads
        self.size = options.num_workers(ray.cluster_resources())
        self._lock = threading.Lock()
        self._opening: dict[Any, Any] = {}
        self._idle: list[Any] = []
        self._num_busy, self._losses = 0, 0
        self._began_s = time.monotonic()

    @property
    def fingerprint(self) -> Fingerprint:
        return self._here.fingerprint

    def has_room(self, num_under_way: int) -> bool:
        """Tells whether an open worker has nothing to do. Raises the error of one that cannot open,
        and Unavailable where they are lost over and over while they begin.
        """
        with self._lock:
            self._hire()
            if self._opening:
                opened, _ = self._ray.wait(
                    list(self._opening), num_returns=len(self._opening), timeout=0
                )
                for call in opened:
                    self._welcome(call)
            num_open = len(self._idle) + self._num_busy
        self._tell_of_no_room(num_open)
        return num_under_way < num_open

    def _hire(self) -> None:
        while len(self._opening) + len(self._idle) + self._num_busy < self.size:
            actor = self._hired.remote(*self._arguments)
            self._opening[actor.open.remote(__version__)] = actor

    def _welcome(self, call: Any) -> None:
        actor = self._opening.pop(call)
        try:
            self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise_cause(error.cause)
        except self._ray.exceptions.RayError as error:
            self._end(actor)
            self._losses += 1
            if self._losses > _LOSSES * self.size:
                raise Unavailable(
                    "the workers on Ray are lost over and over while they begin",
                    remedy="give each more of a node (MLCD_JOBS__RAY_CPUS): memory may be short",
                ) from error
        else:
            self._losses = 0
            self._idle.append(actor)

    def _tell_of_no_room(self, num_open: int) -> None:
        waits_s = time.monotonic() - self._began_s
        if self._announce is not None and num_open == 0 and waits_s > RAY_ANSWER_S:
            self._announce(self._options.no_room)
            self._announce = None

    def perform(self, work: Work, watch: Watch) -> Outcome:
        if work.stage != "shard":
            return self._computing.submit(self._here.perform, work, watch).result()
        actor = self._answering()
        try:
            outcome = self._attended(actor, work, watch)
        except (WorkerLost, Hung, _Ended):
            self._end(actor)
            with self._lock:
                self._num_busy -= 1
            raise
        except BaseException:
            self._rest(actor)
            raise
        self._rest(actor)
        return outcome

    def forget(self) -> None:
        self._computing.submit(self._here.forget).result()

    def close(self) -> None:
        """Ends all workers: the cluster gets its room back."""
        for actor in [*self._idle, *self._opening.values()]:
            self._end(actor)

    def _answering(self) -> Any:
        """Returns an idle worker that answers. Raises EngineDown where none does: the task is not
        at fault.
        """
        while True:
            with self._lock:
                if not self._idle:
                    raise EngineDown
                actor = self._idle.pop()
                self._num_busy += 1
            try:
                self._ray.get(actor.look.remote("", 0.0, stop=False), timeout=RAY_ANSWER_S)
            except self._ray.exceptions.RayError:
                self._end(actor)
                with self._lock:
                    self._num_busy -= 1
            else:
                return actor

    def _rest(self, actor: Any) -> None:
        with self._lock:
            self._num_busy -= 1
            self._idle.append(actor)

    def _attended(self, actor: Any, work: Work, watch: Watch) -> Outcome:
        """Waits for the task, and tells its worker how long the lease is, and to stop."""
        now_s = time.monotonic()
        call = actor.perform.remote(work, watch.until_s - now_s)
        question, asked_s, heard_s, stopped_s = None, 0.0, now_s, None
        while not self._ray.wait([call], num_returns=1, timeout=RAY_POLL_S)[0]:
            now_s = time.monotonic()
            stops = watch.stop or now_s > watch.until_s
            if stops and stopped_s is None:
                stopped_s, question = now_s, None
            if question is not None and (answer := self._answer(question)) is not None:
                question, heard_s = None, now_s
                watch.done = max(watch.done, answer[0])
                if answer[1] > self._stall_s:
                    raise Hung(answer[1])
            if question is None and (now_s - asked_s > RAY_LOOK_S or stopped_s == now_s):
                asked_s = now_s
                question = actor.look.remote(work.lease, watch.until_s - now_s, stop=stops)
            if stopped_s is not None and now_s - stopped_s > RAY_STOP_S:
                raise _Ended
            if now_s - heard_s > self._stall_s:
                raise Hung(now_s - heard_s)
        return self._outcome(call)

    def _answer(self, question: Any) -> tuple[int, float] | None:
        if not self._ray.wait([question], num_returns=1, timeout=0)[0]:
            return None
        try:
            answer: tuple[int, float] = self._ray.get(question)
        except self._ray.exceptions.RayError:
            return None  # the task itself fails as well
        return answer

    def _outcome(self, call: Any) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Stopped | EngineDown):
                raise error.cause from error
            raise_cause(error.cause)
        except self._ray.exceptions.RayError as error:
            raise WorkerLost("a worker on Ray was lost while it was at this shard") from error
        return outcome

    def _end(self, actor: Any) -> None:
        with suppress(Exception):  # it, or the cluster, is gone already
            self._ray.kill(actor)


class _Ended(Stopped):
    """The task did not stop, and its worker was ended."""


@contextmanager
def opened_ray_runner(
    here: TaskRunner,
    computing: ThreadPoolExecutor,
    settings: Settings,
    announce: Callable[[str], None],
) -> Iterator[RayRunner]:
    """Connects to the cluster of the settings. Raises ConfigInvalid without Ray, Unavailable where
    there is no such cluster.
    """
    require_ray("MLCD_JOBS__ENGINE=ray")
    jobs = settings.jobs
    options = RayOptions(
        address=jobs.ray_address,
        workers=jobs.ray_workers,
        cpus=jobs.ray_cpus,
        gpus=jobs.ray_gpus,
    )
    with ray_session(options.address) as ray:
        there = settings_there(settings, options.num_threads)
        runner = RayRunner(ray, options, there, here, computing, announce)
        try:
            yield runner
        finally:
            runner.close()


def settings_there(settings: Settings, num_threads: int) -> Settings:
    """Returns what the workers on Ray get of the settings: places as other machines find them, and
    none of the secrets.
    """
    centers = settings.centers
    return settings.model_copy(
        update={
            "model": model_everywhere(settings.model),
            "centers": None if centers is None else str(Path(centers).absolute()),
            "processes": 1,
            "engine_threads": settings.engine_threads or num_threads,
            "decode_threads": settings.decode_threads or num_threads,
            "redis_url": None,
            "state_dir": None,
            "auth": Auth(),
            "collections": StoredCollections(),
        }
    )
