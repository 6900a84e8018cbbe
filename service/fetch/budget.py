"""The budget of fetched bytes: for each request and for all, as many as for request bodies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlcd.errors import ImageRejected, Overloaded
from mlcd.service.settings import Limits
from mlcd.service.telemetry.metrics import Metrics


class Budget:
    """The server's budget, apart from that of bodies.

    A request that waits for a slow host therefore takes nothing from requests with bodies.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits = limits
        self._num_bytes = 0
        metrics.track_held("fetched_bytes", lambda: self._num_bytes)

    @contextmanager
    def share(self) -> Iterator["Share"]:
        """Opens the share of one request, which releases at its end what it took."""
        share = Share(self, self._limits.max_body_bytes)
        try:
            yield share
        finally:
            self.take(-share.num_bytes)

    def take(self, num: int) -> None:
        if self._num_bytes + num > self._limits.max_queued_bytes:
            raise Overloaded(
                "the server is at its limit of fetched bytes", remedy="try again in a moment"
            )
        self._num_bytes += num


class Share:
    """The share of one request."""

    def __init__(self, budget: Budget, most: int) -> None:
        self._budget, self._most = budget, most
        self.num_bytes = 0

    @contextmanager
    def image(self) -> Iterator[Callable[[int], None]]:
        """Yields `reach` for one image, to be called with its total size whenever more is known.

        `reach` raises ImageRejected where the request then has too many bytes, Overloaded where the
        server has. A failed image releases its bytes at once.
        """
        num_taken = 0

        def reach(num: int) -> None:
            nonlocal num_taken
            more = max(0, num - num_taken)
            self._take(more)
            num_taken += more

        try:
            yield reach
        except BaseException:
            self._take(-num_taken)
            raise

    def _take(self, num: int) -> None:
        if self.num_bytes + num > self._most:
            raise ImageRejected(
                "too-many-bytes",
                f"the images fetched for a request have more than {self._most} bytes",
                remedy="the limit max_body_bytes is stated in /v1/info",
            )
        self._budget.take(num)
        self.num_bytes += num
