"""The workers on a Ray cluster: each opens a job's shards, and makes the shards assigned to it.

Ray places the workers and transports the calls. All results are in the unfinished output: workers,
nodes and the driver may be lost at any moment.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Final, Protocol

from mlcd.errors import Unavailable
from mlcd.images.quiet import silence_decoders
from mlcd.pipelines.encoded import OnDone
from mlcd.pipelines.ray.session import RayOptions, check_version, hide_gpus, raise_cause
from mlcd.version import __version__

_MAX_TRIES: Final = 3  # of a shard with images that the file system fails to read
_MAX_LOSSES_PER_WORKER: Final = 3  # without any finished shard in between
_WAIT_S: Final = 10.0


class MadeByAny(Protocol):
    """Shards that any process can make, as `mlcd.pipelines.shard.Shards`."""

    def check(self) -> None: ...

    def make(self, shard: int, on_done: OnDone, *, is_last_try: bool = True) -> int: ...


# Opens the shards on the node that calls it, given the number of threads; Ray pickles it.
Opener = Callable[[int], AbstractContextManager[MadeByAny]]


class ShardWorker:
    """The actor: one process of the cluster, which opens its resources once for all its shards."""

    def __init__(self, opener: Opener, num_threads: int, num_gpus: float) -> None:
        self._opener, self._num_threads, self._num_gpus = opener, num_threads, num_gpus
        self._stack = ExitStack()

    def open(self, version: str) -> None:
        """Opens the shards; not done in the constructor, because Ray wraps its errors.

        version: version of the driver's mlcd.
        """
        check_version(version)
        silence_decoders()
        hide_gpus(self._num_gpus)
        self._shards = self._stack.enter_context(self._opener(self._num_threads))
        self._shards.check()

    def make(self, shard: int, *, is_last_try: bool) -> int:
        """Makes the shard and returns the number of its images that failed."""
        return self._shards.make(shard, lambda _done, _errors: None, is_last_try=is_last_try)


def make_shards(
    ray: Any,
    opener: Opener,
    shards: Sequence[int],
    options: RayOptions,
    *,
    on_made: Callable[[int, int], None],
    on_wait: Callable[[str], None],
) -> None:
    """Makes these shards on the connected cluster; a lost worker is replaced.

    on_made: called with (shard, number of its images without a result). on_wait: called once with a
    message for the user if the cluster is full. Raises a worker's error, and Unavailable if workers
    are lost repeatedly.
    """
    pool = _WorkerPool(ray, opener, shards, options)
    try:
        while pool.unfinished:
            pool.assign()
            pool.receive(on_made, on_wait)
    finally:
        pool.kill_all()


class _WorkerPool:
    """The workers and the shard that each makes; None while a worker opens."""

    def __init__(
        self, ray: Any, opener: Opener, shards: Sequence[int], options: RayOptions
    ) -> None:
        self._ray, self._options = ray, options
        self._actor_class = ray.remote(**options.demand)(ShardWorker)
        self._arguments = (opener, options.num_threads, options.gpus)
        self._num_workers = options.num_workers(ray.cluster_resources())
        self._waiting = deque(shards)
        self._running: dict[Any, tuple[Any, int | None]] = {}
        self._idle: list[Any] = []
        self._num_tries: Counter[int] = Counter()
        self._losses = 0
        self._has_waited = False
        self.unfinished = len(shards)

    def assign(self) -> None:
        """Starts missing workers, and gives each idle worker a shard."""
        while len(self._running) + len(self._idle) < min(self._num_workers, self.unfinished):
            worker = self._actor_class.remote(*self._arguments)
            self._running[worker.open.remote(__version__)] = worker, None
        while self._waiting and self._idle:
            worker, shard = self._idle.pop(), self._waiting.popleft()
            self._num_tries[shard] += 1
            is_last = self._num_tries[shard] >= _MAX_TRIES
            self._running[worker.make.remote(shard, is_last_try=is_last)] = worker, shard

    def receive(self, on_made: Callable[[int, int], None], on_wait: Callable[[str], None]) -> None:
        """Waits for a worker to finish a task, and handles its result."""
        done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_WAIT_S)
        if not done and not self._has_waited and self._all_open():
            self._has_waited = True
            on_wait(self._options.no_room)
        for task in done:
            worker, shard = self._running.pop(task)
            try:
                failed = self._ray.get(task)
            except self._ray.exceptions.RayActorError:
                self._lose(worker, shard)
            except self._ray.exceptions.RayTaskError as error:
                self._idle.append(worker)
                self._try_again(error.cause, shard)
            else:
                self._idle.append(worker)
                if shard is not None:
                    self.unfinished -= 1
                    self._losses = 0
                    on_made(shard, failed)

    def _all_open(self) -> bool:
        return not self._idle and all(shard is None for _, shard in self._running.values())

    def _lose(self, worker: Any, shard: int | None) -> None:
        self._end(worker)
        self._losses += 1
        if self._losses > _MAX_LOSSES_PER_WORKER * min(self._num_workers, self.unfinished):
            when = "while they started" if shard is None else f"the last one at shard {shard}"
            raise Unavailable(
                f"the workers on Ray fail repeatedly, {when}",
                remedy="a node may have run out of memory: raise --cpus (CPUs per worker), which"
                " puts fewer workers on each node; the same command continues",
            )
        if shard is not None:
            self._waiting.append(shard)

    def _try_again(self, error: Exception, shard: int | None) -> None:
        """Queues the shard again after a transient error; raises any other error."""
        if (
            shard is not None
            and isinstance(error, Unavailable)
            and self._num_tries[shard] < _MAX_TRIES
        ):
            self._waiting.append(shard)
        else:
            raise_cause(error)

    def kill_all(self) -> None:
        for worker in [*self._idle, *(worker for worker, _ in self._running.values())]:
            self._end(worker)

    def _end(self, worker: Any) -> None:
        with suppress(Exception):  # the worker or the cluster is gone already
            self._ray.kill(worker)
