"""The limit on images and texts a minute of each key, counted here or shared through Redis."""

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

if TYPE_CHECKING:  # the counter's library and the Redis client take long to import
    from redis.asyncio import ConnectionPool

    from mlcd.service.keys.window_counter import WindowCounter

_log = logging.getLogger("mlcd.service")
_Answer = TypeVar("_Answer")
_POLICY: Final = '"default"'


class RateLimiter:
    """The rates of all keys. Use from one event loop.

    A Redis that is down, slow or full never fails a request.
    """

    def __init__(self, shared: "ConnectionPool | None" = None, *, metrics: Metrics) -> None:
        """Prepares the counters. shared: of the Redis in which several servers count together."""
        self._pool = shared
        self._shared = None if shared is None else _new_counter(shared)
        self._rest_until: float | None = None
        self._metrics = metrics

    @cached_property
    def local(self) -> "WindowCounter":
        """The counter of this process."""
        return _new_counter()

    async def take(self, key: Key | None, num: int, *, num_counted: int = 0) -> None:
        """Counts `num` images; a key without a rate, and no key, is not limited.

        num_counted: images of the same request that were counted before and are part of it. Raises
        RateExceeded, and InvalidInput for more at once than the key may ever send; neither counts
        `num`.
        """
        if key is None or key.rate is None or not num:
            return
        if num_counted + num > key.rate:
            count = (
                f"{num} images in one request"
                if not num_counted
                else f"one request counts as {num_counted + num} images"
            )
            raise InvalidInput(
                f"{count}, and the API key may send {key.rate} a minute", remedy="send fewer"
            )
        rate = key.rate
        if wait_s := await self._ask(lambda counter: counter.take(key, rate, num, num_counted)):
            self._metrics.count_rejected("rate")
            raise RateExceeded(key.rate, retry_after_s=wait_s)

    async def headers(
        self, key: Key | None, retry_after_s: int | None
    ) -> list[tuple[bytes, bytes]]:
        """Returns RateLimit-Policy and RateLimit as draft-ietf-httpapi-ratelimit-headers has them;
        none for a key without a rate. retry_after_s: where this answer refuses for the rate.
        """
        if key is None or key.rate is None:
            return []
        rate = key.rate
        num_left, seconds = await self._ask(lambda counter: counter.count_left(key, rate))
        return [
            (b"ratelimit-policy", f'{_POLICY};q={rate};w={RATE_WINDOW_S};qu="images"'.encode()),
            (b"ratelimit", f"{_POLICY};r={num_left};t={retry_after_s or seconds}".encode()),
        ]

    async def _ask(self, ask: "Callable[[WindowCounter], Awaitable[_Answer]]") -> _Answer:
        """Asks the shared counter, or the one of this process while Redis does not answer."""
        now = asyncio.get_running_loop().time()
        if (
            self._shared is None
            or self._pool is None
            or (self._rest_until is not None and now < self._rest_until)
        ):
            return await ask(self.local)
        from limits.errors import StorageError

        if self._rest_until is not None:
            self._rest_until = now + RATE_REDIS_REST_S  # only one request tries Redis again
        try:
            async with asyncio.timeout(RATE_REDIS_S):
                answer = await ask(self._shared)
        except (StorageError, TimeoutError):
            self._log_once(answers=False)
            self._rest_until = now + RATE_REDIS_REST_S
            # After a failover others are connected to a replica, too.
            await self._pool.disconnect(inuse_connections=False)
            return await ask(self.local)
        self._log_once(answers=True)
        self._rest_until = None
        return answer

    def _log_once(self, *, answers: bool) -> None:
        if answers != (self._rest_until is None):
            state = (
                "answers again"
                if answers
                else "does not answer: each server counts for itself until it does"
            )
            _log.warning("the Redis of the rates %s", state)


class RequestAccount:
    """The account of one request at the pipeline; its owner is the key, or else the request."""

    def __init__(
        self, limiter: RateLimiter, key: Key | None, *, num_counted: int, pixels_per_image: int
    ) -> None:
        """Takes what is counted already.

        num_counted: images. pixels_per_image: see `Limits.rate_pixels`.
        """
        self._limiter, self._key = limiter, key
        self._num_counted, self._pixels_per_image = num_counted, pixels_per_image

    @property
    def owner(self) -> object:
        return self if self._key is None else self._key.id

    async def charge(self, pixels: Sequence[int]) -> None:
        """Counts large images several times: each was counted once already."""
        more = sum(max(0, num - 1) // self._pixels_per_image for num in pixels)
        await self._limiter.take(self._key, more, num_counted=self._num_counted)


class ComputedAccount:
    """The account of texts that cost nothing where they are cached: one that is computed is one."""

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
    """Opens the rates. keyed: there may be keys, whose first request must not wait for imports.

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
            "MLCD_REDIS_URL needs the package redis", remedy=install_command("redis")
        ) from error
    return open_async_redis_pool(url)


def _new_counter(shared: "ConnectionPool | None" = None) -> "WindowCounter":
    from mlcd.service.keys.window_counter import WindowCounter

    return WindowCounter(shared)
