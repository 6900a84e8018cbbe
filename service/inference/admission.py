"""Bounds on what the server takes on at a time: images, their pixels, texts, bytes of bodies.

More is refused at once.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from mlcd.errors import Overloaded
from mlcd.service.settings import Limits
from mlcd.service.telemetry.metrics import Metrics
from mlcd.service.timings import BURST_S, MAX_RETRY_S, MIN_RETRY_S, RATE_MEMORY_S

# The share of the time left that the work may take: the rate is a measurement, and an admitted
# image must be answered in time.
_MARGIN: Final = 0.75


class Capacity:
    """A bounded number of units that owners share fairly. Use from one event loop."""

    def __init__(self, of: str, most: int, *, always: int, metrics: Metrics) -> None:
        """Prepares a capacity of `most` units.

        of: the name of the units. always: how many one owner may reserve, however few are free.
        """
        self._of, self._most, self._always = of, most, always
        self._metrics = metrics
        self._reserved = 0
        metrics.track_held(of, lambda: self._reserved)
        self._reserved_by: Counter[object] = Counter()

    def check(self, num: int, *, owner: object | None) -> None:
        """Raises Overloaded where `num` units cannot be reserved now.

        owner: with None only the server's own limit counts.
        """
        if not self.has_room(num, owner=owner):
            whose = "the server" if self._reserved + num > self._most else "this client"
            self._metrics.count_rejected("overloaded")
            raise Overloaded(
                f"{whose} is at its limit of {self._of}", remedy="try again in a moment"
            )

    def has_room(self, num: int, *, owner: object | None) -> bool:
        """Tells whether `num` units can be reserved now; see `check`."""
        free = self._most - self._reserved - num
        # Each owner must leave as much free as it has reserved itself, however many are greedy: one
        # alone can take half of the whole, two a third each, and a newcomer always finds something.
        mine = 0 if owner is None else self._reserved_by[owner] + num
        return free >= 0 and mine <= max(free, self._always)

    def reserve(self, num: int, *, owner: object | None) -> None:
        """Reserves `num` units until `release`. Raises what `check` raises."""
        self.check(num, owner=owner)
        self._change(num, owner)

    def release(self, num: int, *, owner: object | None) -> None:
        self._change(-num, owner)

    @contextmanager
    def hold(self, num: int, *, owner: object | None) -> Iterator[None]:
        """Reserves `num` units within the context. Raises what `check` raises."""
        self.reserve(num, owner=owner)
        try:
            yield
        finally:
            self.release(num, owner=owner)

    def _change(self, num: int, owner: object | None) -> None:
        self._reserved += num
        if owner is not None:
            self._reserved_by[owner] += num
            if not self._reserved_by[owner]:
                del self._reserved_by[owner]


class DrainRate:
    """The number of items finished lately per second of work. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._items = self._busy_s = 0.0
        self._burst_items = self._burst_s = 0.0
        self._burst_began = -math.inf
        self._since: float | None = None

    def working(self, now: float) -> None:
        """Notes that work starts, if there was none."""
        self._since = now if self._since is None else self._since

    def count_finished(self, num: int, now: float, *, idle: bool) -> None:
        """Counts `num` finished items. idle: no more work is left."""
        elapsed = now - (self._since if self._since is not None else now)
        if now - self._burst_began > BURST_S:
            self._end_burst()
            self._burst_began = now
        self._burst_items += num
        self._burst_s += elapsed
        self._since = None if idle else now
        if idle:
            self._end_burst()

    def seconds_for(self, num: int, now: float) -> float:
        """Returns how long `num` items take; 0 before anything was measured."""
        under_way = now - self._burst_began <= BURST_S
        items, busy_s = (self._items, self._busy_s) if under_way else self._with_burst()
        return num * busy_s / items if items else 0.0

    def _end_burst(self) -> None:
        self._items, self._busy_s = self._with_burst()
        self._burst_items = self._burst_s = 0.0
        self._burst_began = -math.inf

    def _with_burst(self) -> tuple[float, float]:
        decay = math.exp(-self._burst_s / RATE_MEMORY_S)
        return self._items * decay + self._burst_items, self._busy_s * decay + self._burst_s


class Places:
    """The places of items of one kind, images or texts, which all requests share.

    Use from one event loop.
    """

    def __init__(self, of: str, most: int, *, metrics: Metrics, in_turn: bool = False) -> None:
        """Prepares `most` places.

        of: the name of the items. in_turn: requests differ much in size and are served in turn, an
        item each, so that a small one waits for no large one's rest.
        """
        self._of, self._most, self._in_turn = of, most, in_turn
        self._num = self._num_requests = 0
        metrics.track_held(of, lambda: self._num)
        self._rate = DrainRate()
        self._metrics = metrics

    @property
    def full(self) -> bool:
        """Tells whether no further item would be admitted."""
        return self._num >= self._most

    def has_room(self, num: int, *, deadline: float) -> bool:
        """Tells whether `num` items would be admitted now.

        The limit must leave capacity for them, and by the measured rate they must be in time.
        """
        if self._num + num > self._most:
            return False
        now = asyncio.get_running_loop().time()
        before = min(self._num, num * self._num_requests) if self._in_turn else self._num
        return not self._num or self._rate.seconds_for(before + num, now) <= _MARGIN * (
            deadline - now
        )

    @property
    def retry_after_s(self) -> int:
        """The time until about half of the items are done, by the measured rate.

        It is a whole number of seconds, from 1 to 30.
        """
        return bound_retry_s(
            self._rate.seconds_for(self._num, asyncio.get_running_loop().time()) / 2
        )

    @contextlib.contextmanager
    def hold(self, num: int, *, deadline: float) -> Iterator[None]:
        """Reserves places for `num` items within the context.

        Raises Overloaded where there are none, or where the items would not be done in time.
        """
        if not self.has_room(num, deadline=deadline):
            raise self.refusal()
        self._rate.working(asyncio.get_running_loop().time())
        self._num += num
        self._num_requests += 1
        try:
            yield
        finally:
            self._num -= num
            self._num_requests -= 1
            self._rate.count_finished(num, asyncio.get_running_loop().time(), idle=not self._num)

    def refusal(self) -> Overloaded:
        self._metrics.count_rejected("overloaded")
        return Overloaded(
            f"the server is at its limit of {self._of}", remedy="try again in a moment"
        )


@dataclass(frozen=True)
class Admission:
    """The limits that all requests of a server share. Use from one event loop.

    pixels: pixels of images, by their headers. bytes: bytes of bodies. answers: bytes of answers.
    streams: event streams.
    """

    images: Places
    texts: Places
    pixels: Capacity
    bytes: Capacity
    answers: Capacity
    streams: Capacity

    @classmethod
    def of(cls, limits: Limits, metrics: Metrics) -> "Admission":
        return cls(
            images=Places("images", limits.max_queued_images, metrics=metrics),
            texts=Places("texts", limits.max_queued_texts, metrics=metrics, in_turn=True),
            pixels=Capacity(
                "pixels", limits.max_queued_pixels, always=limits.max_pixels, metrics=metrics
            ),
            bytes=Capacity(
                "bytes", limits.max_queued_bytes, always=limits.max_body_bytes, metrics=metrics
            ),
            answers=Capacity(
                "answers",
                limits.max_unread_bytes,
                always=limits.max_answer_bytes,
                metrics=metrics,
            ),
            streams=Capacity(
                "streams", limits.max_streams, always=limits.max_streams, metrics=metrics
            ),
        )

    @property
    def retry_after_s(self) -> int:
        """The seconds after which a refused client should come back, whatever it sends."""
        return max(self.images.retry_after_s, self.texts.retry_after_s)


def bound_retry_s(seconds: float) -> int:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(seconds)))
