"""The cache in Redis, shared by servers and kept over restarts.

Whatever Redis does, requests lose a few milliseconds at most. Where the operator has set a limit,
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

_KEPT_CONNECTIONS: Final = 2  # one that looks up and one that writes
_MAX_CONNECTIONS: Final = 4
_LOOKED_UP_TOGETHER: Final = 256  # keys of one round trip
_MAX_WAITING: Final = 2048  # vectors that wait to be written; more are dropped
_WRITE_TOGETHER: Final = 64  # vectors of one round trip
# Times a look-up's timeout, for connecting, which takes several round trips, and for writing: no
# request waits for these.
_PATIENCE: Final = 10


class RedisCache:
    """The vectors in Redis. Use as an async context manager, from one event loop."""

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

        prefix: that of our keys' names. timeout_s: that of a look-up. max_bytes: while Redis uses
        more, nothing is written. Raises ConfigInvalid for a malformed URL.
        """
        self._prefix, self._vectors = prefix, vectors
        self._timeout_s, self._ttl_s = timeout_s, ttl_s
        self._metrics = metrics
        pool = open_async_redis_pool(
            url,
            BlockingConnectionPool,
            max_connections=_MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_connect_timeout=_PATIENCE * timeout_s,
            socket_timeout=_PATIENCE * timeout_s,  # look-ups have their own
        )
        self._client: Redis = Redis.from_pool(pool)
        self._memory_limit = RedisMemoryLimit(self._client, max_bytes)
        self._waiting: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue(_MAX_WAITING)
        self._turn = asyncio.Lock()
        self._gathered: list[bytes] = []
        self._gathering: asyncio.Task[dict[bytes, object] | None] | None = None
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
        """Returns the packed vectors of the keys that have a sound one; none where Redis fails.

        Keys that are asked for while a look-up is under way go along with the next one, so many
        requests cost few round trips. The answer comes within twice `timeout_s`, a little later
        while a Redis is just failing.
        """
        values = await self._values(keys) if self._circuit.closed else None
        if values is None:
            self._metrics.cache_looked_up("redis", "error", len(keys))
            return {}
        sound = {key: self._vectors.unseal(key, values[key]) for key in keys}
        hits = {key: packed for key, packed in sound.items() if packed is not None}
        num_missing = sum(values[key] is None for key in keys)
        num_damaged = len(keys) - len(hits) - num_missing
        # Damage may come from a connection that returns answers to other requests: opening the
        # circuit connects anew.
        self._circuit.count_failure() if num_damaged else self._circuit.count_success()
        self._metrics.cache_looked_up("redis", "hit", len(hits))
        self._metrics.cache_looked_up("redis", "miss", num_missing)
        self._metrics.cache_looked_up("redis", "damaged", num_damaged)
        return hits

    def put(self, key: bytes, packed: bytes) -> None:
        """Queues a vector, which is written soon or dropped; the caller does not wait."""
        try:
            self._waiting.put_nowait((key, packed))
        except asyncio.QueueFull:
            self._metrics.cache_written("dropped", 1)

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    async def _values(self, keys: Sequence[bytes]) -> dict[bytes, object] | None:
        if self._gathering is None or len(self._gathered) >= _LOOKED_UP_TOGETHER:
            self._gathered = []
            # It has a context of its own, because its log lines must not name one request.
            look_up = self._look_up(self._gathered)
            self._gathering = asyncio.create_task(look_up, name="cache-look-up", context=Context())
        self._gathered += keys
        return await asyncio.shield(self._gathering)  # other requests wait for it, too

    async def _look_up(self, keys: list[bytes]) -> dict[bytes, object] | None:
        """Returns what Redis holds under each of `keys`; None where it fails.

        `keys` grows until the look-up before has ended.
        """
        async with self._turn:
            if self._gathered is keys:
                self._gathering = None
            if not self._circuit.closed:
                return None
            try:
                async with asyncio.timeout(self._timeout_s):
                    values = await self._client.mget([self._name(key) for key in keys])
                values_by_key: dict[bytes, object] = dict(zip(keys, values, strict=True))
            except Exception as error:  # noqa: BLE001 - that server may answer anything
                self._note_failure(error)
                return None
        return values_by_key

    async def _write(self) -> None:
        while True:
            entries = [await self._waiting.get()]
            while len(entries) < _WRITE_TOGETHER and not self._waiting.empty():
                entries.append(self._waiting.get_nowait())
            if self._circuit.closed:
                await self._write_together(entries)
            else:
                self._metrics.cache_written("dropped", len(entries))

    async def _write_together(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, packed in entries:
            pipeline.set(self._name(key), self._vectors.seal(key, packed), ex=self._ttl_s)
        try:
            async with asyncio.timeout(_PATIENCE * self._timeout_s):
                if not await self._memory_limit.allows_writing():
                    self._metrics.cache_written("full", len(entries))
                    return
                answers = await pipeline.execute(raise_on_error=False)
        except NoPermissionError:  # Redis denies INFO; look-ups go on
            self._metrics.cache_written("error", len(entries))
            return
        except Exception as error:  # noqa: BLE001 - as above
            self._note_failure(error)
            self._metrics.cache_written("error", len(entries))
            return
        # A Redis that is full refuses writes and still answers look-ups.
        num_refused = sum(isinstance(answer, Exception) for answer in answers)
        self._metrics.cache_written("written", len(entries) - num_refused)
        self._metrics.cache_written("error", num_refused)

    def _note_failure(self, error: Exception) -> None:
        # A replica answers look-ups, which would hide that it takes no writes.
        if isinstance(error, NotPrimaryError):
            self._circuit.open(str(error))
        else:
            self._circuit.count_failure()

    async def _ping(self) -> bool:
        return await self._client.ping() is True

    async def _answers(self) -> bool:
        """Connects anew, with patience; tells whether Redis then answers as fast as a look-up, and
        is not one that takes no writes from anybody.
        """
        try:
            async with asyncio.timeout(_PATIENCE * self._timeout_s):
                await self._client.connection_pool.disconnect()
                async with asyncio.TaskGroup() as connecting:
                    for _ in range(_KEPT_CONNECTIONS):
                        connecting.create_task(self._ping())
                with contextlib.suppress(ResponseError):  # of this client, or of a full disk
                    await self._client.delete(self._prefix)  # a write that changes nothing
            async with asyncio.timeout(self._timeout_s):
                return await self._ping()
        except Exception:  # noqa: BLE001 - as above
            return False


class RedisMemoryLimit:
    """A limit on the memory that Redis uses for all clients; it reports no client's share."""

    def __init__(self, client: Redis, max_bytes: int | None) -> None:
        """Takes the limit. max_bytes: None means unlimited, and Redis is not asked."""
        self._client, self._max_bytes = client, max_bytes
        self._used_bytes = 0
        self._asked = -CACHE_ROOM_FRESH_S

    async def allows_writing(self) -> bool:
        """Tells whether Redis uses less than the limit. Raises what the client raises."""
        if self._max_bytes is None:
            return True
        if time.monotonic() - self._asked >= CACHE_ROOM_FRESH_S:
            self._used_bytes = (await self._client.info("memory"))["used_memory"]
            self._asked = time.monotonic()
        return self._used_bytes < self._max_bytes
