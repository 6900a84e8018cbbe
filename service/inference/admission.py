"""How much the server takes on at a time: images, their pixels, the bytes of bodies. More is refused at once."""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from mlcd.errors import Overloaded
from service.telemetry.metrics import Metrics
from service.timings import BURST_S, MAX_RETRY_S, MIN_RETRY_S, RATE_MEMORY_S

_MARGIN: Final = 0.75
"""Of the time left: the rate is a measurement, and what is admitted shall be answered in time."""


class Capacity:
    """A bounded number of units, of which owners leave each other a share. Use from one event loop."""

    def __init__(self, of: str, most: int, *, always: int, metrics: Metrics) -> None:
        """of: what the units are. always: so many one owner may hold, however little is free."""
        self._of, self._most, self._always = of, most, always
        self._metrics = metrics
        self._held = 0
        self._held_by: Counter[object] = Counter()

    def check(self, num: int, *, owner: object | None) -> None:
        """Raises Overloaded where so many cannot be reserved now. None is an owner without a share."""
        free = self._most - self._held - num
        # However many owners are greedy, each leaves as much free as it holds itself: one alone can
        # take half of the whole, two a third each, and there is always something for a newcomer.
        if free < 0 or (owner is not None and self._held_by[owner] + num > max(free, self._always)):
            whose = "the server" if free < 0 else "this client"
            self._metrics.rejected("overloaded")
            raise Overloaded(
                f"{whose} holds as many {self._of} as it may", remedy="try again in a moment"
            )

    def reserve(self, num: int, *, owner: object | None) -> None:
        """Reserves so many until `release`. Raises as `check`."""
        self.check(num, owner=owner)
        self._change(num, owner)

    def release(self, num: int, *, owner: object | None) -> None:
        self._change(-num, owner)

    @contextmanager
    def reserved(self, num: int, *, owner: object | None) -> Iterator[None]:
        """Reserves so many for a while. Raises as `check`."""
        self.reserve(num, owner=owner)
        try:
            yield
        finally:
            self.release(num, owner=owner)

    def _change(self, num: int, owner: object | None) -> None:
        self._held += num
        self._metrics.held(self._of, self._held)
        if owner is not None:
            self._held_by[owner] += num
            if not self._held_by[owner]:
                del self._held_by[owner]


class DrainRate:
    """Images finished per second of work, lately. Times are by one clock, in seconds."""

    def __init__(self) -> None:
        self._images = self._busy_s = 0.0
        self._burst_images = self._burst_s = 0.0
        self._burst_began = -math.inf
        self._since: float | None = None

    def working(self, now: float) -> None:
        """Work starts, where there was none."""
        self._since = now if self._since is None else self._since

    def finished(self, num: int, now: float, *, idle: bool) -> None:
        """idle: that was all the work there was."""
        elapsed = now - (self._since if self._since is not None else now)
        if now - self._burst_began > BURST_S:
            self._end_burst()
            self._burst_began = now
        self._burst_images += num
        self._burst_s += elapsed
        self._since = None if idle else now
        if idle:
            self._end_burst()

    def seconds_for(self, num: int, now: float) -> float:
        """0 before anything was measured."""
        under_way = now - self._burst_began <= BURST_S
        images, busy_s = (self._images, self._busy_s) if under_way else self._with_burst()
        return num * busy_s / images if images else 0.0

    def _end_burst(self) -> None:
        self._images, self._busy_s = self._with_burst()
        self._burst_images = self._burst_s = 0.0
        self._burst_began = -math.inf

    def _with_burst(self) -> tuple[float, float]:
        decay = math.exp(-self._burst_s / RATE_MEMORY_S)
        return self._images * decay + self._burst_images, self._busy_s * decay + self._burst_s


class Admission:
    """Shared by all requests of a server; use from one event loop."""

    def __init__(
        self,
        *,
        max_images: int,
        pixels: Capacity,
        bytes_: Capacity,
        streams: Capacity,
        metrics: Metrics,
    ) -> None:
        """pixels: of pictures, by their headers. bytes_: of bodies. streams: of events."""
        self.pixels, self.bytes, self.streams = pixels, bytes_, streams
        self._max_images = max_images
        self._images = 0
        self._rate = DrainRate()
        self._metrics = metrics

    @property
    def full(self) -> bool:
        """Whether no further image would be admitted."""
        return self._images >= self._max_images

    def has_room(self, num: int, *, deadline: float) -> bool:
        """Whether so many images would be admitted now: there is a place, and by the measured rate they are in time."""
        if self._images + num > self._max_images:
            return False
        now = asyncio.get_running_loop().time()
        return not self._images or self._rate.seconds_for(self._images + num, now) <= _MARGIN * (
            deadline - now
        )

    @property
    def retry_after_s(self) -> int:
        """When about half of what is held will be done, by the measured rate: whole seconds, 1 to 30."""
        return bounded_retry_s(
            self._rate.seconds_for(self._images, asyncio.get_running_loop().time()) / 2
        )

    @contextlib.contextmanager
    def images(self, num: int, *, deadline: float) -> Iterator[None]:
        """A place for so many images. Raises Overloaded where there is none, or none that would be served in time."""
        if not self.has_room(num, deadline=deadline):
            raise self.refusal()
        self._rate.working(asyncio.get_running_loop().time())
        self._images += num
        self._metrics.held("images", self._images)
        try:
            yield
        finally:
            self._images -= num
            self._metrics.held("images", self._images)
            self._rate.finished(num, asyncio.get_running_loop().time(), idle=not self._images)

    def refusal(self) -> Overloaded:
        self._metrics.rejected("overloaded")
        return Overloaded(
            "the server holds as many images as it may", remedy="try again in a moment"
        )


def bounded_retry_s(seconds: float) -> int:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(seconds)))
