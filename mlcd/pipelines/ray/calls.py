"""Maps pure functions over blocks by calls on a Ray cluster.

The calls are stateless, so Ray repeats the calls of a lost node.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from mlcd.errors import Unavailable
from mlcd.pipelines.ray.session import RayOptions, check_version, hide_gpus, raise_cause
from mlcd.version import __version__

_TRIES: Final = 10  # of a call, where nodes are lost
_UNDER_WAY: Final = 3  # calls for each worker: one at work, and others whose input is on its way
_LOOK_S: Final = 10.0


class RayCalls:
    """The calls of functions on the connected cluster.

    on_wait: called once with a line for people where the cluster is full.
    """

    def __init__(
        self, ray: Any, options: RayOptions, on_wait: Callable[[str], None] = lambda _: None
    ) -> None:
        self._ray, self._options, self._on_wait = ray, options, on_wait
        self._kinds: dict[Any, Any] = {}
        resources = ray.cluster_resources()
        self.num_workers = options.num_workers(resources)
        self.memory_bytes = options.memory_bytes(resources)
        self.num_threads = options.num_threads
        # before all others: where it has no room, none has
        self._probe = self.call(int)

    def share(self, value: Any) -> Any:
        """Puts a value where every call may have it, and returns its reference."""
        return self._ray.put(value)

    def call(self, function: Callable[..., Any], *arguments: Any, num_returns: int = 1) -> Any:
        """Begins `function(*given)` in a worker and returns the reference of its result, or of
        each of several; references among the given stand for their values.
        """
        return self._submit(self._options.demand, num_returns, function, arguments)

    def reduce(self, function: Callable[..., Any], *arguments: Any, num_returns: int = 1) -> Any:
        """Begins a call, as `call` does, of a function that only joins results of others."""
        return self._submit({"num_cpus": 0}, num_returns, function, arguments)

    def result(self, call: Any) -> Any:
        """Returns the result of a call. Raises its error, and Unavailable where its workers are
        lost over and over.
        """
        if self._probe is not None:
            self._look_for_room(call)
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise_cause(error.cause)
        except self._ray.exceptions.RayError as error:
            raise Unavailable(
                f"the workers on Ray are lost over and over ({str(error).splitlines()[0]})",
                remedy="give each worker a larger share of a node (--cpus, --memory), and run"
                " again",
            ) from error

    def map(
        self, function: Callable[..., Any], items: Iterable[Any], *common: Any
    ) -> Iterator[Any]:
        """Yields `function(item, *common)` of each item, in order; some calls are under way."""
        calls: deque[Any] = deque()
        for item in items:
            if len(calls) >= _UNDER_WAY * self.num_workers:
                yield self.result(calls.popleft())
            calls.append(self.call(function, item, *common))
        while calls:
            yield self.result(calls.popleft())

    def in_a_tree(self, function: Callable[[Any, Any], Any], values: list[Any]) -> Any:
        """Joins pairs of values, and pairs of these, on the cluster; returns the reference."""
        while len(values) > 1:
            pairs = [values[first : first + 2] for first in range(0, len(values), 2)]
            values = [self.reduce(function, *pair) if len(pair) == 2 else pair[0] for pair in pairs]
        return values[0]

    def _submit(
        self,
        demand: dict[str, float],
        num_returns: int,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> Any:
        kind = (*demand.items(), num_returns)
        if kind not in self._kinds:  # Ray stores each once on the cluster
            options = {**demand, "max_retries": _TRIES, "num_returns": num_returns}
            self._kinds[kind] = self._ray.remote(**options)(run_here)
        return self._kinds[kind].remote(__version__, self._options.gpus, function, *arguments)

    def _look_for_room(self, call: Any) -> None:
        """Waits for the first call, and tells people where none has begun."""
        if not self._ray.wait([call], num_returns=1, timeout=_LOOK_S)[0] and not self._has_begun():
            self._on_wait(self._options.no_room)
        self._probe = None

    def _has_begun(self) -> bool:
        return bool(self._ray.wait([self._probe], num_returns=1, timeout=0)[0])


def run_here(version: str, num_gpus: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function on the node. version: the driver's. num_gpus: GPUs of one worker."""
    check_version(version)
    hide_gpus(num_gpus)
    return function(*arguments)
