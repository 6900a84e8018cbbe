"""Bytes of fetched images: of one request as many as its body might have had, of all requests as many as all bodies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlcd.errors import ImageRejected, Overloaded
from service.settings import Limits
from service.telemetry.metrics import Metrics


class Budget:
    """Of the server. Apart from the budget of bodies: who waits for a slow host takes nothing from the others."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits, self._metrics = limits, metrics
        self._num_bytes = 0

    @contextmanager
    def share(self) -> Iterator["Share"]:
        """For one request; what it took comes back at its end."""
        share = Share(self, self._limits.max_body_bytes)
        try:
            yield share
        finally:
            self.take(-share.num_bytes)

    def take(self, num: int) -> None:
        if self._num_bytes + num > self._limits.max_queued_bytes:
            raise Overloaded(
                "the server holds as many fetched bytes as it may", remedy="try again in a moment"
            )
        self._num_bytes += num
        self._metrics.held("fetched_bytes", self._num_bytes)


class Share:
    """Of one request."""

    def __init__(self, budget: Budget, most: int) -> None:
        self._budget, self._most = budget, most
        self.num_bytes = 0

    @contextmanager
    def image(self) -> Iterator[Callable[[int], None]]:
        """For one image: gives `reach`, to be told how many bytes it has in all, as soon as more of them are known.

        `reach` raises ImageRejected where the request has too many with them, Overloaded where the server has. What a
        failed image took comes back at once.
        """
        taken = 0

        def reach(num: int) -> None:
            nonlocal taken
            more = max(0, num - taken)
            self._take(more)
            taken += more

        try:
            yield reach
        except BaseException:
            self._take(-taken)
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
