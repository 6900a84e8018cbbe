"""The counter of a key's images in the last minute, in this process or in a Redis.

Its library takes a twentieth of a server's imports, and only keys with a rate need it.
"""

import math
from typing import TYPE_CHECKING, Final

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
        """Prepares the counter. shared: of the Redis in which several servers count together.

        Its calls then raise StorageError of the library where that Redis does not answer.
        """
        storage = MemoryStorage() if shared is None else _storage(shared)
        self._storage: SlidingWindowCounterSupport = storage
        self._limiter = SlidingWindowCounterRateLimiter(storage)

    async def take(self, key: Key, rate: int, num: int, num_counted: int) -> int:
        """Counts `num` images and returns 0, or returns the seconds after which they would pass.

        num_counted: images of the same request that were counted before and come back with them.
        """
        item = RateLimitItemPerMinute(rate)
        if await self._limiter.hit(item, key.id, cost=num):
            return 0
        before, before_s, now, now_s = await self._window(item, key)
        wait_s = _wait_s(
            rate - num_counted - num, before, before_s, now, max(0.0, now_s - RATE_WINDOW_S)
        )
        return max(1, math.ceil(wait_s + RATE_ROUNDING_S))

    async def count_left(self, key: Key, rate: int) -> tuple[int, int]:
        """Returns how many images may be sent now, and the seconds that are left of the minute."""
        before, before_s, now, now_s = await self._window(RateLimitItemPerMinute(rate), key)
        counted = now + math.floor(before * before_s / RATE_WINDOW_S)
        rest_s = math.ceil(now_s - RATE_WINDOW_S)
        return max(0, rate - counted), rest_s if rest_s > 0 else RATE_WINDOW_S

    async def _window(
        self, item: RateLimitItemPerMinute, key: Key
    ) -> tuple[int, float, int, float]:
        return await self._storage.get_sliding_window(item.key_for(key.id), RATE_WINDOW_S)


def _wait_s(room: int, before: int, before_s: float, now: int, now_s: float) -> float:
    """Returns the seconds after which at most `room` images count.

    before, now: images of the two minutes. before_s, now_s: what is left of each. Images of the
    minute before count by the share that is left of it, rounded down to a whole image.
    """
    if now <= room:
        return before_s - (room + 1 - now) * RATE_WINDOW_S / before if before else 0.0
    return now_s + max(0.0, RATE_WINDOW_S - (room + 1) * RATE_WINDOW_S / now)


def _storage(pool: "ConnectionPool") -> RedisStorage:
    # The pool knows the server; the library takes only the kind of server from the URL.
    return RedisStorage(
        "async+redis://",
        wrap_exceptions=True,
        implementation="redispy",
        key_prefix=_PREFIX,
        connection_pool=pool,  # type: ignore[arg-type]  # passed on to redis as it is
    )
