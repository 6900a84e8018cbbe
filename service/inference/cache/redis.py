"""The cache in Redis, shared by servers and kept across restarts.

However slow or broken Redis is, requests lose at most a few milliseconds. With a memory limit,
nothing is written while Redis uses more.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from contextvars import Context
from typing import Final, Self

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from mlcd.service.inference.cache.redis_circuit import RedisCircuit
from mlcd.service.inference.cache.vectors import VectorFormat
from mlcd.service.redis_clients import NotPrimaryError, open_async_redis_pool
from mlcd.service.telemetry.metrics import Metrics
from mlcd.service.timings import CACHE_ROOM_FRESH_S

_INITIAL_CONNECTIONS: Final = 2  # for look-ups and for writes
_MAX_CONNECTIONS: Final = 4
_MAX_LOOKUP_KEYS: Final = 256  # keys per round trip
_MAX_QUEUED_WRITES: Final = 2048  # vectors; more are dropped
_MAX_WRITE_BATCH: Final = 64  # vectors per round trip
# Connecting takes several round trips, and no request waits for connecting or writing: their
# timeout is this times a look-up's.
_SLOW_FACTOR: Final = 10


class RedisCache:
    """Cached vectors in Redis. Use as an async context manager, from one event loop."""

    def __init__(
        self,
        url: str,
        prefix: str,
        vectors: VectorFormat,
        *,
        timeout_s: float,
        ttl_s: int,
        max_bytes: int | None,
        metrics: Metrics,
    ) -> None:
        """Makes a client; entering the context connects it.

        prefix: prefix of the keys' names. timeout_s: timeout of a look-up. ttl_s: lifetime of an
        entry. max_bytes: memory of Redis beyond which nothing is written. Raises ConfigInvalid for
        a malformed URL.
        """
        self._prefix, self._vectors = prefix, vectors
        self._timeout_s, self._ttl_s = timeout_s, ttl_s
        self._metrics = metrics
        pool = open_async_redis_pool(
            url,
            BlockingConnectionPool,
            max_connections=_MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_connect_timeout=_SLOW_FACTOR * timeout_s,
            socket_timeout=_SLOW_FACTOR * timeout_s,  # look-ups have a shorter timeout
        )
        self._client: Redis = Redis.from_pool(pool)
        self._memory_limit = RedisMemoryLimit(self._client, max_bytes)
        self._write_queue: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue(_MAX_QUEUED_WRITES)
        self._lookup_lock = asyncio.Lock()
        # the keys of the next look-up, and its task while keys can join it
        self._next_keys: list[bytes] = []
        self._next_lookup: asyncio.Task[dict[bytes, object] | None] | None = None
        self._circuit = RedisCircuit(self._answers, metrics.cache_up)

    async def __aenter__(self) -> Self:
        answers = await self._answers()
        self._metrics.cache_up(answers)
        if not answers:
            self._circuit.open()
        self._writer = asyncio.create_task(self._write(), name="cache-writer")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._writer
        await self._circuit.stop()
        with contextlib.suppress(RedisError, OSError):
            await self._client.aclose()

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Returns the valid packed vectors of the keys; an empty dict if Redis fails.

        Keys that are requested during a look-up are batched for the next one, so that many requests
        cost few round trips. Returns within twice `timeout_s`, or slightly later when Redis starts
        to fail.
        """
        values = await self._values(keys) if self._circuit.closed else None
        if values is None:
            self._metrics.cache_looked_up("redis", "error", len(keys))
            return {}
        unsealed = {key: self._vectors.unseal(key, values[key]) for key in keys}
        hits = {key: packed for key, packed in unsealed.items() if packed is not None}
        num_missing = sum(values[key] is None for key in keys)
        num_damaged = len(keys) - len(hits) - num_missing
        # A connection may return answers to other requests, which look like damage. Opening the
        # circuit reconnects.
        self._circuit.count_failure() if num_damaged else self._circuit.count_success()
        self._metrics.cache_looked_up("redis", "hit", len(hits))
        self._metrics.cache_looked_up("redis", "miss", num_missing)
        self._metrics.cache_looked_up("redis", "damaged", num_damaged)
        return hits

    def put(self, key: bytes, packed: bytes) -> None:
        """Queues a vector, to be written soon or dropped; returns immediately."""
        try:
            self._write_queue.put_nowait((key, packed))
        except asyncio.QueueFull:
            self._metrics.cache_written("dropped", 1)

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    async def _values(self, keys: Sequence[bytes]) -> dict[bytes, object] | None:
        if self._next_lookup is None or len(self._next_keys) >= _MAX_LOOKUP_KEYS:
            self._next_keys = []
            # In a new context, because its log lines belong to no single request.
            look_up = self._look_up(self._next_keys)
            self._next_lookup = asyncio.create_task(
                look_up, name="cache-look-up", context=Context()
            )
        self._next_keys += keys
        return await asyncio.shield(self._next_lookup)  # other requests also wait for it

    async def _look_up(self, keys: list[bytes]) -> dict[bytes, object] | None:
        """Returns Redis's value of each key; None if Redis fails.

        keys: list that may grow until the previous look-up has ended.
        """
        async with self._lookup_lock:
            if self._next_keys is keys:
                self._next_lookup = None
            if not self._circuit.closed:
                return None
            try:
                async with asyncio.timeout(self._timeout_s):
                    values = await self._client.mget([self._name(key) for key in keys])
                values_by_key: dict[bytes, object] = dict(zip(keys, values, strict=True))
            except Exception as error:  # noqa: BLE001 - Redis may answer anything
                self._note_failure(error)
                return None
        return values_by_key

    async def _write(self) -> None:
        while True:
            entries = [await self._write_queue.get()]
            while len(entries) < _MAX_WRITE_BATCH and not self._write_queue.empty():
                entries.append(self._write_queue.get_nowait())
            if self._circuit.closed:
                await self._write_batch(entries)
            else:
                self._metrics.cache_written("dropped", len(entries))

    async def _write_batch(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, packed in entries:
            pipeline.set(self._name(key), self._vectors.seal(key, packed), ex=self._ttl_s)
        try:
            async with asyncio.timeout(_SLOW_FACTOR * self._timeout_s):
                if not await self._memory_limit.allows_writing():
                    self._metrics.cache_written("full", len(entries))
                    return
                answers = await pipeline.execute(raise_on_error=False)
        except NoPermissionError:  # Redis denies INFO; look-ups still work
            self._metrics.cache_written("error", len(entries))
            return
        except Exception as error:  # noqa: BLE001 - as above
            self._note_failure(error)
            self._metrics.cache_written("error", len(entries))
            return
        # A full Redis refuses writes but still answers look-ups.
        num_refused = sum(isinstance(answer, Exception) for answer in answers)
        self._metrics.cache_written("written", len(entries) - num_refused)
        self._metrics.cache_written("error", num_refused)

    def _note_failure(self, error: Exception) -> None:
        # A replica answers look-ups, whose successes would hide that it refuses writes.
        if isinstance(error, NotPrimaryError):
            self._circuit.open(str(error))
        else:
            self._circuit.count_failure()

    async def _ping(self) -> bool:
        return await self._client.ping() is True

    async def _answers(self) -> bool:
        """Reconnects, with a longer timeout; then tells whether Redis answers within a look-up's
        timeout and is not a replica, which refuses writes.
        """
        try:
            async with asyncio.timeout(_SLOW_FACTOR * self._timeout_s):
                await self._client.connection_pool.disconnect()
                async with asyncio.TaskGroup() as connecting:
                    for _ in range(_INITIAL_CONNECTIONS):
                        connecting.create_task(self._ping())
                with contextlib.suppress(ResponseError):  # for this client, or a full disk
                    await self._client.delete(self._prefix)  # a write that changes nothing
            async with asyncio.timeout(self._timeout_s):
                return await self._ping()
        except Exception:  # noqa: BLE001 - as above
            return False


class RedisMemoryLimit:
    """A limit on the memory of Redis for all clients, because Redis reports no client's share."""

    def __init__(self, client: Redis, max_bytes: int | None) -> None:
        """max_bytes: limit; None means unlimited, without requests to Redis."""
        self._client, self._max_bytes = client, max_bytes
        self._used_bytes = 0
        self._last_request = -CACHE_ROOM_FRESH_S

    async def allows_writing(self) -> bool:
        """Tells whether Redis uses less than the limit. Raises the client's errors."""
        if self._max_bytes is None:
            return True
        if time.monotonic() - self._last_request >= CACHE_ROOM_FRESH_S:
            self._used_bytes = (await self._client.info("memory"))["used_memory"]
            self._last_request = time.monotonic()
        return self._used_bytes < self._max_bytes
