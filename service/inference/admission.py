"""Limits on concurrent work: images, their pixels, texts, bytes of bodies. Excess work is refused
immediately.
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

# The fraction of the remaining time that the work may take: the measured rate is not exact, and an
# admitted image must be answered in time.
_MARGIN: Final = 0.75


class Capacity:
    """A limited number of units that owners share fairly. Use from one event loop."""

    def __init__(self, unit: str, limit: int, *, min_per_owner: int, metrics: Metrics) -> None:
        """unit: name of the units. limit: number of units. min_per_owner: number that one owner may
        reserve, even if fewer would be its fair share.
        """
        self._unit, self._limit, self._min_per_owner = unit, limit, min_per_owner
        self._metrics = metrics
        self._reserved = 0
        metrics.track_held(unit, lambda: self._reserved)
        self._reserved_by: Counter[object] = Counter()

    def check(self, num: int, *, owner: object | None) -> None:
        """Raises Overloaded if `num` units cannot be reserved now.

        owner: client that reserves them; None means that only the server's limit applies.
        """
        if not self.has_room(num, owner=owner):
            subject = "the server" if self._reserved + num > self._limit else "this client"
            self._metrics.count_rejected("overloaded")
            raise Overloaded(
                f"{subject} is at its limit of {self._unit}", remedy="try again in a moment"
            )

    def has_room(self, num: int, *, owner: object | None) -> bool:
        """Tells whether `num` units can be reserved now; see `check`."""
        free = self._limit - self._reserved - num
        # Each owner must leave as many units free as it has reserved. So one owner gets at most
        # half, two get a third each, and a newcomer always gets some.
        owned = 0 if owner is None else self._reserved_by[owner] + num
        return free >= 0 and owned <= max(free, self._min_per_owner)

    def reserve(self, num: int, *, owner: object | None) -> None:
        """Reserves `num` units until `release`. Raises Overloaded like `check`."""
        self.check(num, owner=owner)
        self._change(num, owner)

    def release(self, num: int, *, owner: object | None) -> None:
        self._change(-num, owner)

    @contextmanager
    def hold(self, num: int, *, owner: object | None) -> Iterator[None]:
        """Reserves `num` units within the context. Raises Overloaded like `check`."""
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
    """Measures how many items are finished per second of work, over the recent past.

    `now` is always seconds of the same clock.
    """

    def __init__(self) -> None:
        self._items = self._busy_s = 0.0
        self._burst_items = self._burst_s = 0.0
        self._burst_start = -math.inf
        self._since: float | None = None

    def start_work(self, now: float) -> None:
        """Records that work starts, unless work is already in progress."""
        self._since = now if self._since is None else self._since

    def count_finished(self, num: int, now: float, *, idle: bool) -> None:
        """Counts `num` finished items. idle: whether no work is left."""
        elapsed = now - (self._since if self._since is not None else now)
        if now - self._burst_start > BURST_S:
            self._end_burst()
            self._burst_start = now
        self._burst_items += num
        self._burst_s += elapsed
        self._since = None if idle else now
        if idle:
            self._end_burst()

    def seconds_for(self, num: int, now: float) -> float:
        """Returns the expected seconds for `num` items; 0 before the first measurement."""
        in_burst = now - self._burst_start <= BURST_S
        items, busy_s = (self._items, self._busy_s) if in_burst else self._with_burst()
        return num * busy_s / items if items else 0.0

    def _end_burst(self) -> None:
        self._items, self._busy_s = self._with_burst()
        self._burst_items = self._burst_s = 0.0
        self._burst_start = -math.inf

    def _with_burst(self) -> tuple[float, float]:
        decay = math.exp(-self._burst_s / RATE_MEMORY_S)
        return self._items * decay + self._burst_items, self._busy_s * decay + self._burst_s


class Places:
    """A limit on the items of one kind, images or texts, in all requests together.

    Use from one event loop.
    """

    def __init__(
        self, item_kind: str, limit: int, *, metrics: Metrics, in_turn: bool = False
    ) -> None:
        """item_kind: name of the items. in_turn: whether requests are served in turn, one item
        each, so that a small request does not wait for all items of a large one.
        """
        self._item_kind, self._limit, self._in_turn = item_kind, limit, in_turn
        self._num = self._num_requests = 0
        metrics.track_held(item_kind, lambda: self._num)
        self._rate = DrainRate()
        self._metrics = metrics

    @property
    def full(self) -> bool:
        """Tells whether the limit is reached."""
        return self._num >= self._limit

    def has_room(self, num: int, *, deadline: float) -> bool:
        """Tells whether `num` items would be admitted now: they must fit the limit and, by the
        measured rate, be done before the deadline.
        """
        if self._num + num > self._limit:
            return False
        now = asyncio.get_running_loop().time()
        num_ahead = min(self._num, num * self._num_requests) if self._in_turn else self._num
        return not self._num or self._rate.seconds_for(num_ahead + num, now) <= _MARGIN * (
            deadline - now
        )

    @property
    def retry_after_s(self) -> int:
        """The seconds until about half of the items are done, by the measured rate; an integer from
        1 to 30.
        """
        return bound_retry_s(
            self._rate.seconds_for(self._num, asyncio.get_running_loop().time()) / 2
        )

    @contextlib.contextmanager
    def hold(self, num: int, *, deadline: float) -> Iterator[None]:
        """Admits `num` items within the context.

        Raises Overloaded if they exceed the limit or would not be done before the deadline.
        """
        if not self.has_room(num, deadline=deadline):
            raise self.refusal()
        self._rate.start_work(asyncio.get_running_loop().time())
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
            f"the server is at its limit of {self._item_kind}", remedy="try again in a moment"
        )


@dataclass(frozen=True)
class Admission:
    """The limits that all requests of a server share. Use from one event loop.

    pixels: pixels of images, from their headers. bytes: bytes of request bodies. answers: bytes of
    responses. streams: number of event streams.
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
                "pixels", limits.max_queued_pixels, min_per_owner=limits.max_pixels, metrics=metrics
            ),
            bytes=Capacity(
                "bytes",
                limits.max_queued_bytes,
                min_per_owner=limits.max_body_bytes,
                metrics=metrics,
            ),
            answers=Capacity(
                "answers",
                limits.max_unread_bytes,
                min_per_owner=limits.max_answer_bytes,
                metrics=metrics,
            ),
            streams=Capacity(
                "streams", limits.max_streams, min_per_owner=limits.max_streams, metrics=metrics
            ),
        )

    @property
    def retry_after_s(self) -> int:
        """The seconds after which a refused client should retry, whatever it sends."""
        return max(self.images.retry_after_s, self.texts.retry_after_s)


def bound_retry_s(seconds: float) -> int:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(seconds)))
