"""The workers of a Ray cluster: each opens the shards of one piece of work, and makes those that it
is given.

Ray places the workers and carries the calls. What is made is where the shards are, and nowhere
else: workers, nodes and the driver may be lost at any moment.
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

_TRIES: Final = 3  # of a shard whose images the file system does not give, before they are errors
_PATIENCE: Final = 3  # losses for each worker, without any shard in between, before we give up
_LOOK_S: Final = 10.0


class MadeByAny(Protocol):
    """Shards that any process makes, as `mlcd.pipelines.shard.Shards`."""

    def check(self) -> None: ...

    def make(self, shard: int, on_done: OnDone, *, is_last_try: bool = True) -> int: ...


# From the number of threads to the shards, on whichever node it is called; Ray pickles it.
Opener = Callable[[int], AbstractContextManager[MadeByAny]]


class ShardWorker:
    """The actor: one process of the cluster, which holds what all its shards need."""

    def __init__(self, opener: Opener, num_threads: int, num_gpus: float) -> None:
        self._opener, self._num_threads, self._num_gpus = opener, num_threads, num_gpus
        self._stack = ExitStack()

    def open(self, version: str) -> None:
        """Opens the shards here: not in the constructor, whose errors Ray wraps. version: that of
        the driver's mlcd.
        """
        check_version(version)
        silence_decoders()
        hide_gpus(self._num_gpus)
        self._shards = self._stack.enter_context(self._opener(self._num_threads))
        self._shards.check()

    def make(self, shard: int, *, is_last_try: bool) -> int:
        """Returns how many images of the shard failed."""
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

    on_made: is called with (shard, images of it without a result). on_wait: called once with a
    line for people where the cluster is full. Raises what a worker raised, and Unavailable
    where workers are lost over and over.
    """
    crew = _Crew(ray, opener, shards, options)
    try:
        while crew.unfinished:
            crew.assign()
            crew.receive(on_made, on_wait)
    finally:
        crew.dismiss()


class _Crew:
    """The workers and what each is at; None stands for the opening."""

    def __init__(
        self, ray: Any, opener: Opener, shards: Sequence[int], options: RayOptions
    ) -> None:
        self._ray, self._options = ray, options
        self._hired = ray.remote(**options.demand)(ShardWorker)
        self._arguments = (opener, options.num_threads, options.gpus)
        self._size = options.num_workers(ray.cluster_resources())
        self._waiting = deque(shards)
        self._doing: dict[Any, tuple[Any, int | None]] = {}
        self._idle: list[Any] = []
        self._tries: Counter[int] = Counter()
        self._losses = 0
        self._has_waited = False
        self.unfinished = len(shards)

    def assign(self) -> None:
        """Gives every worker something to do, and hires as many as are missing."""
        while len(self._doing) + len(self._idle) < min(self._size, self.unfinished):
            worker = self._hired.remote(*self._arguments)
            self._doing[worker.open.remote(__version__)] = worker, None
        while self._waiting and self._idle:
            worker, shard = self._idle.pop(), self._waiting.popleft()
            self._tries[shard] += 1
            is_last = self._tries[shard] >= _TRIES
            self._doing[worker.make.remote(shard, is_last_try=is_last)] = worker, shard

    def receive(self, on_made: Callable[[int, int], None], on_wait: Callable[[str], None]) -> None:
        """Takes in what some worker has done."""
        done, _ = self._ray.wait(list(self._doing), num_returns=1, timeout=_LOOK_S)
        if not done and not self._has_waited and self._all_open():
            self._has_waited = True
            on_wait(self._options.no_room)
        for task in done:
            worker, shard = self._doing.pop(task)
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
        return not self._idle and all(shard is None for _, shard in self._doing.values())

    def _lose(self, worker: Any, shard: int | None) -> None:
        self._end(worker)
        self._losses += 1
        if self._losses > _PATIENCE * min(self._size, self.unfinished):
            at = "while they began" if shard is None else f"the last one at shard {shard}"
            raise Unavailable(
                f"the workers on Ray fail repeatedly, {at}",
                remedy="memory may be short: give each worker more of a node (--cpus); the same"
                " command continues",
            )
        if shard is not None:
            self._waiting.append(shard)

    def _try_again(self, error: Exception, shard: int | None) -> None:
        """Raises the error of a worker, unless it may pass."""
        if shard is not None and isinstance(error, Unavailable) and self._tries[shard] < _TRIES:
            self._waiting.append(shard)
        else:
            raise_cause(error)

    def dismiss(self) -> None:
        for worker in [*self._idle, *(worker for worker, _ in self._doing.values())]:
            self._end(worker)

    def _end(self, worker: Any) -> None:
        with suppress(Exception):  # it, or the cluster, is gone already
            self._ray.kill(worker)
