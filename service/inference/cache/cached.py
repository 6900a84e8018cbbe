"""A pipeline with a cache: looks embeddings up before admission, and computes each only once."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ConfigInvalid, Rejection
from mlcd.extras import install_command
from mlcd.service.inference.cache.keyspace import KeySpace, redis_prefix
from mlcd.service.inference.cache.memory import MemoryCache
from mlcd.service.inference.cache.vectors import VectorFormat
from mlcd.service.inference.outcomes import Account, Encoded, Pipelined, Timings, slowest
from mlcd.service.inference.served import ServedTower
from mlcd.service.settings import Settings
from mlcd.service.telemetry.metrics import Metrics
from mlcd.service.telemetry.request import time_stage

if TYPE_CHECKING:
    from mlcd.service.inference.cache.redis import RedisCache

# Up to this size, items are hashed on the event loop (0.15 ms): waking a thread would take longer.
# More would block the loop.
_INLINE_BYTES: Final = 256 * 1024
_MAX_LOOKUP_KEYS: Final = 256  # so that Redis does not seem slow because of a large request

# a packed vector, or the reason for none
_Outcome: TypeAlias = bytes | Rejection


@dataclass
class _Request:
    """One request and its results so far.

    keys: keys of all items, by index in the request. outcomes: results so far, by key. computed:
    indices of items that this request computed itself.
    """

    items: Sequence[bytes | Rejection]
    keys: dict[int, bytes]
    deadline: float
    account: Account | None
    outcomes: dict[bytes, _Outcome] = field(default_factory=dict)
    computed: set[int] = field(default_factory=set)
    timings: Timings = field(default_factory=Timings)
    pipeline_s: float = 0.0

    def missing(self) -> dict[bytes, int]:
        """Returns the keys without an outcome, in order, each with one of its indices."""
        return {key: index for index, key in self.keys.items() if key not in self.outcomes}

    def item(self, index: int) -> bytes:
        item = self.items[index]
        assert not isinstance(item, Rejection)
        return item


class CachedPipeline:
    """A pipeline that encodes only items that are in no cache and not yet being encoded.

    An item is an image's bytes, or the token ids of a text. Hits need no admission, because they
    need no decoding and no inference. Every vector is converted to the format of the cache and
    back, so that a miss returns the same bytes as later hits.
    """

    def __init__(
        self,
        pipeline: Pipelined,
        *,
        space: KeySpace,
        vectors: VectorFormat,
        memory: MemoryCache | None,
        redis: "RedisCache | None",
        hasher: Executor,
        metrics: Metrics,
    ) -> None:
        self._pipeline, self._space, self._vectors = pipeline, space, vectors
        self._memory, self._redis = memory, redis
        self._hasher, self._metrics = hasher, metrics
        self._in_flight: dict[bytes, asyncio.Future[_Outcome | None]] = {}

    async def encode(
        self,
        items: Sequence[bytes | Rejection],
        /,
        *,
        deadline: float,
        account: Account | None = None,
    ) -> Encoded:
        """Encodes every item independently; see `Encoding.encode`."""
        started = time.perf_counter()
        with time_stage("cache"):
            request = _Request(items, await self._make_keys(items), deadline, account)
            num_in_memory = self._take_from_memory(request)
        own_keys: set[bytes] = set()
        while missing := request.missing():
            others = {key: self._in_flight[key] for key in missing if key in self._in_flight}
            if own := {key: index for key, index in missing.items() if key not in others}:
                await self._find_or_compute(own, request)
                own_keys |= own.keys()
            await _join(others, request)
        self._metrics.cache_looked_up(
            "in_flight", "hit", len(request.keys) - num_in_memory - len(own_keys)
        )
        request.timings = replace(
            request.timings, cache_s=time.perf_counter() - started - request.pipeline_s
        )
        return self._join_outcomes(request)

    async def _make_keys(self, items: Sequence[bytes | Rejection]) -> dict[int, bytes]:
        items_by_index = {
            index: item for index, item in enumerate(items) if not isinstance(item, Rejection)
        }
        make_keys = partial(self._space.keys, list(items_by_index.values()))
        if sum(map(len, items_by_index.values())) <= _INLINE_BYTES:
            keys = make_keys()
        else:
            keys = await asyncio.get_running_loop().run_in_executor(self._hasher, make_keys)
        return dict(zip(items_by_index, keys, strict=True))

    def _take_from_memory(self, request: _Request) -> int:
        """Adds the vectors in this process's cache to the request's outcomes; returns the number of
        items that have one.
        """
        if self._memory is None:
            return 0
        for key in request.keys.values():
            if (packed := self._memory.get(key)) is not None:
                request.outcomes[key] = packed
        num = sum(key in request.outcomes for key in request.keys.values())
        self._metrics.cache_looked_up("memory", "hit", num)
        self._metrics.cache_looked_up("memory", "miss", len(request.keys) - num)
        return num

    async def _find_or_compute(self, indices: dict[bytes, int], request: _Request) -> None:
        """Finds keys in Redis or computes their vectors; other requests for a key wait for it.

        indices: index of an item for each key.
        """
        loop = asyncio.get_running_loop()
        futures: dict[bytes, asyncio.Future[_Outcome | None]] = {
            key: loop.create_future() for key in indices
        }
        self._in_flight |= futures
        try:
            if self._redis is not None:
                with time_stage("cache"):
                    await self._find(self._redis, list(indices))
            if missing := {key: index for key, index in indices.items() if not futures[key].done()}:
                await self._compute(missing, request)
        finally:
            for key, future in futures.items():
                del self._in_flight[key]
                if not future.done():
                    future.set_result(None)  # this request failed; requests that wait will compute
        await _join(futures, request)

    async def _find(self, redis: "RedisCache", keys: list[bytes]) -> None:
        for start in range(0, len(keys), _MAX_LOOKUP_KEYS):
            packed_by_key = await redis.find(keys[start : start + _MAX_LOOKUP_KEYS])
            for key, packed in packed_by_key.items():
                self._settle(key, packed)

    async def _compute(self, missing: dict[bytes, int], request: _Request) -> None:
        keys, items = list(missing), [request.item(index) for index in missing.values()]
        started = time.perf_counter()
        encoded = await self._pipeline.encode(
            items,
            deadline=request.deadline,
            on_outcome=lambda index, outcome: self._settle_computed(keys[index], outcome),
            account=request.account,
        )
        request.pipeline_s += time.perf_counter() - started
        request.timings = slowest([request.timings, encoded.timings])
        request.computed |= set(missing.values())

    def _settle_computed(self, key: bytes, outcome: NDArray[np.float32] | Rejection) -> None:
        if isinstance(outcome, Rejection):
            self._settle(key, outcome)
            return
        packed = self._vectors.pack(outcome)
        self._settle(key, packed)
        if self._redis is not None and self._vectors.is_sound(packed):
            self._redis.put(key, packed)

    def _settle(self, key: bytes, outcome: _Outcome) -> None:
        if (
            isinstance(outcome, bytes)
            and self._memory is not None
            and self._vectors.is_sound(outcome)
        ):
            self._memory.put(key, outcome)
        future = self._in_flight.get(key)
        if future is not None and not future.done():
            future.set_result(outcome)

    def _join_outcomes(self, request: _Request) -> Encoded:
        outcomes = [
            request.outcomes[request.keys[index]] if index in request.keys else item
            for index, item in enumerate(request.items)
        ]
        errors = {
            index: outcome
            for index, outcome in enumerate(outcomes)
            if isinstance(outcome, Rejection)
        }
        for index in errors.keys() - request.computed:  # the pipeline counted rejections itself
            self._metrics.count_rejected(errors[index].reason)
        rows = [index for index in range(len(outcomes)) if index not in errors]
        vectors = [
            self._vectors.unpack(outcome) for outcome in outcomes if isinstance(outcome, bytes)
        ]
        embeddings = (
            np.stack(vectors) if vectors else np.zeros((0, self._vectors.dimension), np.float32)
        )
        rounded = None if self._vectors.exact else self._vectors.dtype
        return Encoded(embeddings, rows, errors, request.timings, rounded)


async def _join(
    futures: Mapping[bytes, "asyncio.Future[_Outcome | None]"], request: _Request
) -> None:
    """Waits for the futures and adds their outcomes; the future of a failed request has none."""
    if futures:
        await asyncio.wait(futures.values())
    for key, future in futures.items():
        outcome = future.result()
        if outcome is not None:
            request.outcomes[key] = outcome


@dataclass(frozen=True)
class TowerCache:
    """The open caches of one model, which its towers share with separate keys."""

    vectors: VectorFormat
    memory: MemoryCache | None
    redis: "RedisCache | None"
    hasher: Executor
    metrics: Metrics

    def before(self, pipeline: Pipelined, space: KeySpace) -> CachedPipeline:
        return CachedPipeline(
            pipeline,
            space=space,
            vectors=self.vectors,
            memory=self.memory,
            redis=self.redis,
            hasher=self.hasher,
            metrics=self.metrics,
        )


@asynccontextmanager
async def open_cache(
    settings: Settings, encoder: ServedTower, metrics: Metrics, memory: MemoryCache | None
) -> AsyncIterator[TowerCache | None]:
    """Opens a cache in `memory` and in the Redis of `settings`; None without either.

    Raises ConfigInvalid if the package for Redis is missing or its URL is malformed. An unreachable
    Redis is not an error.
    """
    cache = settings.cache
    use_redis = settings.redis_url is not None and cache.ttl_s > 0
    if not use_redis and memory is None:
        yield None
        return
    vectors = VectorFormat(encoder.dimension, cache.dtype)
    async with AsyncExitStack() as stack:
        hasher = ThreadPoolExecutor(1, thread_name_prefix="hash")
        stack.callback(hasher.shutdown, wait=False, cancel_futures=True)
        redis = (
            await stack.enter_async_context(_open_redis(settings, encoder, vectors, metrics))
            if use_redis
            else None
        )
        yield TowerCache(vectors, memory, redis, hasher, metrics)


def _open_redis(
    settings: Settings, encoder: ServedTower, vectors: VectorFormat, metrics: Metrics
) -> "RedisCache":
    try:
        from mlcd.service.inference.cache.redis import RedisCache
    except ModuleNotFoundError as error:
        raise ConfigInvalid(
            "MLCD_REDIS_URL needs the package redis", remedy=install_command("redis")
        ) from error
    assert settings.redis_url is not None
    return RedisCache(
        settings.redis_url.get_secret_value(),
        redis_prefix(encoder.fingerprint),
        vectors,
        timeout_s=settings.cache.timeout_s,
        ttl_s=settings.cache.ttl_s,
        max_bytes=settings.cache.redis_bytes,
        metrics=metrics,
    )
