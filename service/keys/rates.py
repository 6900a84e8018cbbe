"""The rate limits of keys: images and texts a minute, counted per process or in a shared Redis."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeVar

from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.extras import install_command
from mlcd.service.errors import RateExceeded
from mlcd.service.keys.file import Key
from mlcd.service.telemetry.metrics import Metrics
from mlcd.service.timings import RATE_REDIS_REST_S, RATE_REDIS_S, RATE_WINDOW_S

if TYPE_CHECKING:  # the counter's library and the Redis client are slow to import
    from redis.asyncio import ConnectionPool

    from mlcd.service.keys.window_counter import WindowCounter

_log = logging.getLogger("mlcd.service")
_Result = TypeVar("_Result")
_POLICY: Final = '"default"'


class RateLimiter:
    """The rate limits of all keys. Use from one event loop.

    If Redis is down, slow or full, requests do not fail: each process counts for itself.
    """

    def __init__(self, shared: "ConnectionPool | None" = None, *, metrics: Metrics) -> None:
        """shared: connections to the Redis in which several servers count together."""
        self._pool = shared
        self._shared = None if shared is None else _new_counter(shared)
        self._retry_time: float | None = None
        self._metrics = metrics

    @cached_property
    def local(self) -> "WindowCounter":
        """The counter within this process."""
        return _new_counter()

    async def take(self, key: Key | None, num: int, *, num_counted: int = 0) -> None:
        """Counts `num` images, unless `key` is None or without a rate.

        num_counted: images of the same request that were counted before. Raises RateExceeded, or
        InvalidInput for a request that exceeds the rate on its own; then `num` is not counted.
        """
        if key is None or key.rate is None or not num:
            return
        if num_counted + num > key.rate:
            raise InvalidInput(
                f"the API key may send {key.rate} images a minute, and this request counts as"
                f" {num_counted + num} images",
                remedy="send fewer images at once",
            )
        rate = key.rate
        if wait_s := await self._call_counter(
            lambda counter: counter.take(key, rate, num, num_counted)
        ):
            self._metrics.count_rejected("rate")
            raise RateExceeded(key.rate, retry_after_s=wait_s)

    async def headers(
        self, key: Key | None, retry_after_s: int | None
    ) -> list[tuple[bytes, bytes]]:
        """Returns RateLimit-Policy and RateLimit, defined in draft-ietf-httpapi-ratelimit-headers;
        [] for a key without a rate. retry_after_s: seconds if this answer refuses the request.
        """
        if key is None or key.rate is None:
            return []
        rate = key.rate
        num_left, seconds = await self._call_counter(lambda counter: counter.count_left(key, rate))
        return [
            (b"ratelimit-policy", f'{_POLICY};q={rate};w={RATE_WINDOW_S};qu="images"'.encode()),
            (b"ratelimit", f"{_POLICY};r={num_left};t={retry_after_s or seconds}".encode()),
        ]

    async def _call_counter(self, call: "Callable[[WindowCounter], Awaitable[_Result]]") -> _Result:
        """Calls the shared counter, or this process's counter while Redis does not answer."""
        now = asyncio.get_running_loop().time()
        if (
            self._shared is None
            or self._pool is None
            or (self._retry_time is not None and now < self._retry_time)
        ):
            return await call(self.local)
        from limits.errors import StorageError

        if self._retry_time is not None:
            self._retry_time = now + RATE_REDIS_REST_S  # only this request tries Redis again
        try:
            async with asyncio.timeout(RATE_REDIS_S):
                answer = await call(self._shared)
        except (StorageError, TimeoutError):
            self._log_once(answers=False)
            self._retry_time = now + RATE_REDIS_REST_S
            # After a failover, idle connections may lead to a replica, too.
            await self._pool.disconnect(inuse_connections=False)
            return await call(self.local)
        self._log_once(answers=True)
        self._retry_time = None
        return answer

    def _log_once(self, *, answers: bool) -> None:
        if answers != (self._retry_time is None):
            state = (
                "answers again: servers count together"
                if answers
                else "does not answer: until it does, each server process counts for itself"
            )
            _log.warning("the Redis for rate limits %s", state)


class RequestAccount:
    """Charges a request's large images to its key. owner: the key's id, else this object."""

    def __init__(
        self, limiter: RateLimiter, key: Key | None, *, num_counted: int, pixels_per_image: int
    ) -> None:
        """num_counted: images of the request counted before. pixels_per_image: see
        `Limits.rate_pixels`.
        """
        self._limiter, self._key = limiter, key
        self._num_counted, self._pixels_per_image = num_counted, pixels_per_image

    @property
    def owner(self) -> object:
        return self if self._key is None else self._key.id

    async def charge(self, pixels: Sequence[int]) -> None:
        """Counts large images several times; each image was already counted once."""
        num_more = sum(max(0, num - 1) // self._pixels_per_image for num in pixels)
        await self._limiter.take(self._key, num_more, num_counted=self._num_counted)


class ComputedAccount:
    """Charges only texts that are not cached, each as one text."""

    def __init__(self, limiter: RateLimiter, key: Key | None) -> None:
        self._limiter, self._key = limiter, key

    @property
    def owner(self) -> object:
        return self if self._key is None else self._key.id

    async def charge(self, pixels: Sequence[int]) -> None:
        await self._limiter.take(self._key, len(pixels))


@asynccontextmanager
async def open_rate_limiter(
    redis_url: str | None, *, metrics: Metrics, keyed: bool = True
) -> AsyncIterator[RateLimiter]:
    """Opens the rate limiter. keyed: keys may exist, so the counter is imported here already.

    Raises ConfigInvalid for a malformed URL, or without the Redis client.
    """
    if redis_url is None:
        limiter = RateLimiter(metrics=metrics)
        if keyed:
            _ = limiter.local
        yield limiter
        return
    pool = _open_pool(redis_url)
    try:
        yield RateLimiter(pool, metrics=metrics)
    finally:
        await pool.aclose()


def _open_pool(url: str) -> "ConnectionPool":
    try:
        from mlcd.service.redis_clients import open_async_redis_pool
    except ImportError as error:
        raise ConfigInvalid(
            "MLCD_REDIS_URL requires the package redis", remedy=install_command("redis")
        ) from error
    return open_async_redis_pool(url)


def _new_counter(shared: "ConnectionPool | None" = None) -> "WindowCounter":
    from mlcd.service.keys.window_counter import WindowCounter

    return WindowCounter(shared)
