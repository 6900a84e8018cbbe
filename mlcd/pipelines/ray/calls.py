"""Maps pure functions over blocks by calls on a Ray cluster.

The calls are stateless, so Ray repeats the calls of a lost node.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from mlcd.errors import Unavailable
from mlcd.pipelines.ray.session import RayOptions, check_version, hide_gpus, raise_cause
from mlcd.version import __version__

_MAX_RETRIES: Final = 10  # of a call whose node is lost
_CALLS_PER_WORKER: Final = 3  # one runs while the input of the next is transferred
_WAIT_S: Final = 10.0


class RayCalls:
    """The calls of functions on the connected cluster.

    on_wait: called once with a message for the user if the cluster is full.
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
        # submitted first: if the cluster has no room for it, no call has started
        self._probe = self.call(int)

    def share(self, value: Any) -> Any:
        """Stores a value on the cluster for all calls, and returns its reference."""
        return self._ray.put(value)

    def call(self, function: Callable[..., Any], *arguments: Any, num_returns: int = 1) -> Any:
        """Submits `function(*arguments)` to a worker. Returns the reference of its result, or of
        each of its results; references among `arguments` are replaced by their values.
        """
        return self._submit(self._options.demand, num_returns, function, arguments)

    def reduce(self, function: Callable[..., Any], *arguments: Any, num_returns: int = 1) -> Any:
        """Submits a call, as `call` does, of a function that only combines other results."""
        return self._submit({"num_cpus": 0}, num_returns, function, arguments)

    def result(self, call: Any) -> Any:
        """Returns the result of a call. Raises its error, and Unavailable if its workers are
        lost repeatedly.
        """
        if self._probe is not None:
            self._warn_if_full(call)
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise_cause(error.cause)
        except self._ray.exceptions.RayError as error:
            raise Unavailable(
                f"the workers on Ray are lost repeatedly ({str(error).splitlines()[0]})",
                remedy="give each worker a larger share of a node (--cpus, --memory), and run"
                " again",
            ) from error

    def map(
        self, function: Callable[..., Any], items: Iterable[Any], *common: Any
    ) -> Iterator[Any]:
        """Yields `function(item, *common)` of each item, in order; a few calls run ahead."""
        calls: deque[Any] = deque()
        for item in items:
            if len(calls) >= _CALLS_PER_WORKER * self.num_workers:
                yield self.result(calls.popleft())
            calls.append(self.call(function, item, *common))
        while calls:
            yield self.result(calls.popleft())

    def in_a_tree(self, function: Callable[[Any, Any], Any], values: list[Any]) -> Any:
        """Reduces values pairwise, in a tree, on the cluster; returns the result's reference."""
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
            options = {**demand, "max_retries": _MAX_RETRIES, "num_returns": num_returns}
            self._kinds[kind] = self._ray.remote(**options)(run_here)
        return self._kinds[kind].remote(__version__, self._options.gpus, function, *arguments)

    def _warn_if_full(self, call: Any) -> None:
        """Waits for the first call, and warns the user if no call has started."""
        if (
            not self._ray.wait([call], num_returns=1, timeout=_WAIT_S)[0]
            and not self._has_started()
        ):
            self._on_wait(self._options.no_room)
        self._probe = None

    def _has_started(self) -> bool:
        return bool(self._ray.wait([self._probe], num_returns=1, timeout=0)[0])


def run_here(version: str, num_gpus: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function on the node. version: the driver's. num_gpus: GPUs of one worker."""
    check_version(version)
    hide_gpus(num_gpus)
    return function(*arguments)
