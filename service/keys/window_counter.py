"""The counter of a key's images in the last minute, in this process or in a Redis.

Import this module late: its library takes 5 % of a server's import time, and only keys with a rate
need it.
"""

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.storage.base import SlidingWindowCounterSupport
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from mlcd.service.keys.file import Key
from mlcd.service.timings import RATE_ROUNDING_S, RATE_WINDOW_S

_PREFIX: Final = "mlcd:rate"

if TYPE_CHECKING:
    from redis.asyncio import ConnectionPool


class WindowCounter:
    """The images of the last minute, by a sliding window.

    It counts those of the current minute, and the share of the minute before that is still in the
    window.
    """

    def __init__(self, shared: "ConnectionPool | None" = None) -> None:
        """Prepares the counter. shared: connections to the Redis that several servers share.

        Its calls then raise StorageError of the library where that Redis does not answer.
        """
        storage = MemoryStorage() if shared is None else _storage(shared)
        self._storage: SlidingWindowCounterSupport = storage
        self._limiter = SlidingWindowCounterRateLimiter(storage)

    async def take(self, key: Key, rate: int, num: int, num_counted: int) -> int:
        """Counts `num` images and returns 0, or returns the seconds after which they would pass.

        num_counted: images of the same request that were counted before; a retry sends them again.
        """
        item = RateLimitItemPerMinute(rate)
        if await self._limiter.hit(item, key.id, cost=num):
            return 0
        window = await self._window(item, key)
        wait_s = _wait_s(rate - num_counted - num, window)
        return max(1, math.ceil(wait_s + RATE_ROUNDING_S))

    async def count_left(self, key: Key, rate: int) -> tuple[int, int]:
        """Returns how many images may be sent now, and the seconds that are left of the minute."""
        window = await self._window(RateLimitItemPerMinute(rate), key)
        previous = math.floor(window.previous_count * window.previous_left_s / RATE_WINDOW_S)
        rest_s = math.ceil(window.current_left_s)
        num_left = max(0, rate - window.current_count - previous)
        return num_left, rest_s if rest_s > 0 else RATE_WINDOW_S

    async def _window(self, item: RateLimitItemPerMinute, key: Key) -> "_Window":
        counts = await self._storage.get_sliding_window(item.key_for(key.id), RATE_WINDOW_S)
        previous_count, previous_left_s, current_count, current_ttl_s = counts
        current_left_s = current_ttl_s - RATE_WINDOW_S  # the library keeps a minute for one more
        return _Window(previous_count, previous_left_s, current_count, current_left_s)


class _Window(NamedTuple):
    """The images of the previous and of the current minute, and the seconds left of each."""

    previous_count: int
    previous_left_s: float
    current_count: int
    current_left_s: float


def _wait_s(room: int, window: _Window) -> float:
    """Returns the seconds after which at most `room` images count.

    Images of the previous minute count by the share of it that is still in the window, rounded down
    to a whole image.
    """
    if window.current_count <= room:
        if not window.previous_count:
            return 0.0
        left_out_s = (room + 1 - window.current_count) * RATE_WINDOW_S / window.previous_count
        return window.previous_left_s - left_out_s
    needed_s = RATE_WINDOW_S - (room + 1) * RATE_WINDOW_S / window.current_count
    return max(0.0, window.current_left_s) + max(0.0, needed_s)


def _storage(pool: "ConnectionPool") -> RedisStorage:
    # The pool knows the server; the library takes only the kind of server from the URL.
    return RedisStorage(
        "async+redis://",
        wrap_exceptions=True,
        implementation="redispy",
        key_prefix=_PREFIX,
        connection_pool=pool,  # type: ignore[arg-type]  # passed on to redis as it is
    )
