"""The counter of a key's images in the last minute, in this process or in Redis.

Import this module lazily: `limits` takes 5 % of a server's import time, and only keys with a rate
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
    """Counts the images of the last minute in a sliding window.

    The count is the images of the current minute plus those of the previous minute, weighted by the
    share of the previous minute that is still in the window.
    """

    def __init__(self, shared: "ConnectionPool | None" = None) -> None:
        """shared: connections to the Redis that several servers share; None counts in this process.

        With `shared`, methods raise the StorageError of `limits` if Redis does not answer.
        """
        storage = MemoryStorage() if shared is None else _open_storage(shared)
        self._open_storage: SlidingWindowCounterSupport = storage
        self._limiter = SlidingWindowCounterRateLimiter(storage)

    async def take(self, key: Key, rate: int, num: int, num_counted: int) -> int:
        """Counts `num` images and returns 0; if they exceed the rate, returns the seconds to wait.

        num_counted: images of the same request that were counted before; a retry sends them again.
        """
        item = RateLimitItemPerMinute(rate)
        if await self._limiter.hit(item, key.id, cost=num):
            return 0
        window = await self._read_window(item, key)
        wait_s = _compute_wait_s(rate - num_counted - num, window)
        return max(1, math.ceil(wait_s + RATE_ROUNDING_S))

    async def count_left(self, key: Key, rate: int) -> tuple[int, int]:
        """Returns the number of images that may be sent now, and the seconds left in the minute."""
        window = await self._read_window(RateLimitItemPerMinute(rate), key)
        num_previous = math.floor(window.previous_count * window.previous_left_s / RATE_WINDOW_S)
        current_left_s = math.ceil(window.current_left_s)
        num_left = max(0, rate - window.current_count - num_previous)
        return num_left, current_left_s if current_left_s > 0 else RATE_WINDOW_S

    async def _read_window(self, item: RateLimitItemPerMinute, key: Key) -> "_Window":
        counts = await self._open_storage.get_sliding_window(item.key_for(key.id), RATE_WINDOW_S)
        previous_count, previous_left_s, current_count, current_ttl_s = counts
        current_left_s = (
            current_ttl_s - RATE_WINDOW_S
        )  # the library keeps a window one minute longer
        return _Window(previous_count, previous_left_s, current_count, current_left_s)


class _Window(NamedTuple):
    """The images of the previous and the current minute, and the seconds until each expires."""

    previous_count: int
    previous_left_s: float
    current_count: int
    current_left_s: float


def _compute_wait_s(max_count: int, window: _Window) -> float:
    """Returns the seconds until the window counts at most `max_count` images.

    The share of the previous minute's images is rounded down to a whole image.
    """
    if window.current_count <= max_count:
        if not window.previous_count:
            return 0.0
        allowed_s = (max_count + 1 - window.current_count) * RATE_WINDOW_S / window.previous_count
        return window.previous_left_s - allowed_s
    needed_s = RATE_WINDOW_S - (max_count + 1) * RATE_WINDOW_S / window.current_count
    return max(0.0, window.current_left_s) + max(0.0, needed_s)


def _open_storage(pool: "ConnectionPool") -> RedisStorage:
    # The pool has the server's address; the library reads only the kind of server from the URL.
    return RedisStorage(
        "async+redis://",
        wrap_exceptions=True,
        implementation="redispy",
        key_prefix=_PREFIX,
        connection_pool=pool,  # type: ignore[arg-type]  # passed to redis unchanged
    )
