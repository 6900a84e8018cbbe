"""The budget of fetched bytes, per request and in total; the limits are those of request bodies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlcd.errors import ImageRejected, Overloaded
from mlcd.service.settings import Limits
from mlcd.service.telemetry.metrics import Metrics


class Budget:
    """The server's budget of fetched bytes.

    It is separate from the budget of bodies, so that slow hosts do not block requests with bodies.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits = limits
        self._num_bytes = 0
        metrics.track_held("fetched_bytes", lambda: self._num_bytes)

    @contextmanager
    def share(self) -> Iterator["Share"]:
        """Opens the share of one request, whose bytes are released at its end."""
        share = Share(self, self._limits.max_body_bytes)
        try:
            yield share
        finally:
            self.take(-share.num_bytes)

    def take(self, num_bytes: int) -> None:
        """Adds bytes, or releases a negative number. Raises Overloaded above the limit."""
        if self._num_bytes + num_bytes > self._limits.max_queued_bytes:
            raise Overloaded(
                "the server is at its limit of fetched bytes", remedy="try again in a moment"
            )
        self._num_bytes += num_bytes


class Share:
    """The part of the budget that one request uses."""

    def __init__(self, budget: Budget, max_bytes: int) -> None:
        self._budget, self._max_bytes = budget, max_bytes
        self.num_bytes = 0

    @contextmanager
    def image(self) -> Iterator[Callable[[int], None]]:
        """Yields `grow_to` for one image, to be called with its total bytes whenever they grow.

        `grow_to` raises ImageRejected if the request exceeds its limit, and Overloaded if the
        server does. An image that fails releases its bytes immediately.
        """
        num_taken = 0

        def grow_to(num_bytes: int) -> None:
            nonlocal num_taken
            num_more = max(0, num_bytes - num_taken)
            self._take(num_more)
            num_taken += num_more

        try:
            yield grow_to
        except BaseException:
            self._take(-num_taken)
            raise

    def _take(self, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self._max_bytes:
            raise ImageRejected(
                "too-many-bytes",
                f"the images fetched for a request must have at most {self._max_bytes} bytes",
                remedy="the limit max_body_bytes is stated in /v1/info",
            )
        self._budget.take(num_bytes)
        self.num_bytes += num_bytes
