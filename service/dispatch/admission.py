"""How much the server takes on at a time: images, their pixels, the bytes of bodies. More is refused at once."""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

from mlcd.errors import Overloaded
from service.observability.metrics import Metrics

_MIN_RETRY_S: Final = 1
_MAX_RETRY_S: Final = 30
_MEMORY_S: Final = 2.0
"""Of the measured rate: what was long ago says little."""
_BURST_S: Final = 0.1
"""A batch's images end one after the other: the first of them alone makes the rate of a slow engine look hopeless."""
_MARGIN: Final = 0.75
"""Of the time left: the rate is a measurement, and what is admitted shall be answered in time."""


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
        if now - self._burst_began > _BURST_S:
            self._end_burst()
            self._burst_began = now
        self._burst_images += num
        self._burst_s += elapsed
        self._since = None if idle else now
        if idle:
            self._end_burst()

    def seconds_for(self, num: int, now: float) -> float:
        """0 before anything was measured."""
        under_way = now - self._burst_began <= _BURST_S
        images, busy_s = (self._images, self._busy_s) if under_way else self._with_burst()
        return num * busy_s / images if images else 0.0

    def _end_burst(self) -> None:
        self._images, self._busy_s = self._with_burst()
        self._burst_images = self._burst_s = 0.0
        self._burst_began = -math.inf

    def _with_burst(self) -> tuple[float, float]:
        decay = math.exp(-self._burst_s / _MEMORY_S)
        return self._images * decay + self._burst_images, self._busy_s * decay + self._burst_s


class Admission:
    """Shared by all requests of a server; use from one event loop."""

    def __init__(
        self,
        *,
        max_images: int,
        max_pixels: int,
        max_bytes: int,
        max_body_bytes: int,
        max_streams: int,
        metrics: Metrics,
    ) -> None:
        self._max_images, self._max_pixels = max_images, max_pixels
        self._max_bytes, self._max_body_bytes = max_bytes, max_body_bytes
        self._max_streams = max_streams
        self._images = self._pixels = self._bytes = self._streams = 0
        self._bytes_of: Counter[str] = Counter()
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
        return not self._images or self._rate.seconds_for(self._images + num, now) <= _MARGIN * (deadline - now)

    @property
    def retry_after_s(self) -> int:
        """When about half of what is held will be done, by the measured rate: whole seconds, 1 to 30."""
        return bounded_retry_s(self._rate.seconds_for(self._images, asyncio.get_running_loop().time()) / 2)

    @contextlib.contextmanager
    def images(self, num: int, *, deadline: float) -> Iterator[None]:
        """A place for so many images. Raises Overloaded where there is none, or none that would be served in time."""
        if not self.has_room(num, deadline=deadline):
            raise self.refusal("images")
        self._rate.working(asyncio.get_running_loop().time())
        self._images += num
        self._metrics.held("images", self._images)
        try:
            yield
        finally:
            self._images -= num
            self._metrics.held("images", self._images)
            self._rate.finished(num, asyncio.get_running_loop().time(), idle=not self._images)

    @contextlib.contextmanager
    def pixels(self, num: int) -> Iterator[None]:
        """A place for images of so many pixels together, by their headers."""
        if self._pixels + num > self._max_pixels:
            raise self.refusal("pixels")
        self._pixels += num
        self._metrics.held("pixels", self._pixels)
        try:
            yield
        finally:
            self._pixels -= num
            self._metrics.held("pixels", self._pixels)

    def check_bytes(self, num: int, *, key: str | None) -> None:
        """Raises Overloaded where `reserve_bytes` would: before anything of a body is read."""
        free = self._max_bytes - self._bytes - num
        if free < 0:
            raise self.refusal("bytes")
        # However many keys are greedy, each of them leaves as much free as it holds itself: one
        # alone can fill half of the whole, and there is always something left for a newcomer.
        if key is not None and self._bytes_of[key] + num > max(free, self._max_body_bytes):
            self._metrics.rejected("overloaded")
            raise Overloaded(
                "the API key holds as many bytes as it may at one time",
                remedy="try again when its other requests are answered",
            )

    def reserve_bytes(self, num: int, *, key: str | None) -> None:
        """Reserves memory for bytes of a body, until `release_bytes`. None is nobody's share.

        Raises Overloaded where the server, or the key, holds as many as it may.
        """
        self.check_bytes(num, key=key)
        self._change_bytes(num, key)

    def release_bytes(self, num: int, *, key: str | None) -> None:
        """Releases what was reserved."""
        self._change_bytes(-num, key)

    def _change_bytes(self, num: int, key: str | None) -> None:
        self._bytes += num
        self._metrics.held("bytes", self._bytes)
        if key is not None:
            self._bytes_of[key] += num
            if not self._bytes_of[key]:
                del self._bytes_of[key]

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Reserves a place for a stream of events. Raises Overloaded where there is none."""
        if self._streams >= self._max_streams:
            raise self.refusal("event streams")
        self._streams += 1
        self._metrics.held("streams", self._streams)
        try:
            yield
        finally:
            self._streams -= 1
            self._metrics.held("streams", self._streams)

    def refusal(self, of: str) -> Overloaded:
        self._metrics.rejected("overloaded")
        return Overloaded(f"the server holds as many {of} as it may", remedy="try again in a moment")


def bounded_retry_s(seconds: float) -> int:
    return min(_MAX_RETRY_S, max(_MIN_RETRY_S, math.ceil(seconds)))
