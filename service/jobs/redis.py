"""The queue's database in Redis, which several machines share. Leases follow the clock of Redis.

`redis_keys` lists the keys. A transaction reads records and names, decides, and writes by one
script. If a value that it read has changed by then, the script does nothing and the transaction is
run again. Answered writes are as durable as the settings of Redis make them.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec

from redis import Redis
from redis.exceptions import RedisError

from mlcd.backoff import Backoff
from mlcd.errors import ArtifactInvalid, ConfigInvalid, MlcdError, Unavailable
from mlcd.service.errors import RecordDamaged
from mlcd.service.jobs.clock import MAX_LATE_DUE, Clock, latest_due_s
from mlcd.service.jobs.database import CANDIDATES, KEPT_EVENTS, Ended, Listed, Result
from mlcd.service.jobs.job import (
    Event,
    Failure,
    JobState,
    StoredJob,
    failure_from_json,
    failure_to_json,
    job_from_json,
    job_to_json,
    record_from_json,
    record_to_json,
)
from mlcd.service.jobs.redis_keys import Keys
from mlcd.service.redis_clients import NotPrimaryError, open_redis_pool
from mlcd.service.timings import (
    QUEUE_CONNECT_S,
    QUEUE_FAILOVER_FIRST_S,
    QUEUE_FAILOVER_S,
    QUEUE_REDIS_S,
)
from mlcd.types import Fingerprint

_Arguments = ParamSpec("_Arguments")

_STATES: Final[tuple[JobState, ...]] = ("queued", "running", "succeeded", "failed", "canceled")
_SCHEMA: Final = "1"
_ARGUMENTS: Final = 1000  # Values of one command in the script: Lua unpacks a few thousand at most.
# KEYS: the keys that were read. ARGV: the commands as JSON, then the value of each key, empty where
# there was none.
_COMMIT: Final = """
for place, key in ipairs(KEYS) do
  if (redis.call('GET', key) or '') ~= ARGV[place + 1] then return 0 end
end
for _, command in ipairs(cjson.decode(ARGV[1])) do redis.call(unpack(command)) end
return 1
"""

_log = logging.getLogger("mlcd.service")


def open_redis_database(url: str, prefix: str) -> "RedisDatabase":
    """Opens the database; it connects when it is first used. Raises ConfigInvalid for a URL that
    Redis cannot use.
    """
    pool = open_redis_pool(
        url,
        decode_responses=True,
        socket_connect_timeout=QUEUE_CONNECT_S,
        socket_timeout=QUEUE_REDIS_S,
    )
    return RedisDatabase(Redis.from_pool(pool), Keys(prefix))


def _asks(
    method: Callable[Concatenate["RedisDatabase", _Arguments], Result],
) -> Callable[Concatenate["RedisDatabase", _Arguments], Result]:
    """Repeats a method that failed because Redis is not a primary, as during a failover.

    Raises Unavailable if that persists, and if Redis does not answer.
    """

    @wraps(method)
    def ask(
        self: "RedisDatabase", /, *args: _Arguments.args, **options: _Arguments.kwargs
    ) -> Result:
        backoff, waited_s = Backoff(QUEUE_FAILOVER_FIRST_S, QUEUE_FAILOVER_S), 0.0
        while True:
            try:
                return method(self, *args, **options)
            except NotPrimaryError as error:
                self.drop_connections()
                if waited_s >= QUEUE_FAILOVER_S:
                    raise Unavailable(
                        f"the job queue's Redis {error}",
                        remedy="come back soon; MLCD_REDIS_URL must lead to the primary",
                    ) from error
            except (RedisError, OSError) as error:
                raise Unavailable(
                    "the job queue's Redis does not answer, or takes no writes",
                    remedy="come back soon; what it has is kept",
                ) from error
            pause_s = backoff.next_s()
            time.sleep(pause_s)
            waited_s += pause_s

    return ask


class RedisDatabase:
    """A `JobDatabase` in Redis. Threads and processes may share one Redis."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client: Any = client  # its types do not know that answers are decoded
        self._keys = keys
        self._clock = Clock(self._read_clock_s)
        self._commit = client.register_script(_COMMIT)
        self._keeps = False  # True once it is known that jobs can be kept there.

    @_asks
    def transact(self, step: Callable[["_RedisTransaction"], Result]) -> Result:
        self._check_keeps()
        while True:
            transaction = _RedisTransaction(self._client, self._keys, self._clock)
            try:
                result = step(transaction)
            except MlcdError:  # for good only if what it read was there at one moment
                transaction.commands.clear()
                if self._ends(transaction):
                    raise
            else:
                if self._ends(transaction):
                    return result

    @_asks
    def read(self, job_id: str) -> StoredJob | None:
        record = self._client.get(self._keys.record(job_id))
        return None if record is None else record_from_json(record)

    @_asks
    def due(
        self, fingerprints: Sequence[Fingerprint], *, lease_s: float, exclude: Collection[str] = ()
    ) -> list[str]:
        num = CANDIDATES + len(exclude)
        due: set[str] = set()
        late: set[str] = set()
        now_s = self._clock.now_s()
        for key in map(self._keys.due, fingerprints):
            # Waiting tasks are due from 0 on, the oldest job first.
            # Leases and pauses end at their own times.
            due |= set(self._client.zrangebyscore(key, 0, 0, 0, num))
            due |= set(self._client.zrangebyscore(key, "(0", now_s, 0, num))
            late |= set(
                self._client.zrangebyscore(
                    key, latest_due_s(now_s, lease_s), "+inf", 0, MAX_LATE_DUE + len(exclude)
                )
            )
        late_ids = sorted(late.difference(exclude))[:MAX_LATE_DUE]
        return sorted(due.difference(exclude))[:CANDIDATES] + late_ids

    @_asks
    def pending(
        self, fingerprints: Sequence[Fingerprint], *, exclude: Collection[str] = ()
    ) -> bool:
        ids_by_model = (
            self._client.zrange(key, 0, len(exclude)) for key in map(self._keys.due, fingerprints)
        )
        return any(set(ids).difference(exclude) for ids in ids_by_model)

    @_asks
    def page(self, *, limit: int, below: str | None, state: JobState | None) -> list[Listed]:
        key = self._keys.all if state is None else self._keys.state(state)
        ids = self._client.zrevrangebylex(key, "+" if below is None else f"({below}", "-", 0, limit)
        records = self._client.mget(map(self._keys.record, ids)) if ids else []
        return [Listed.of(job_id, record) for job_id, record in zip(ids, records, strict=True)]

    @_asks
    def events(self, job_id: str, after: int) -> list[Event]:
        lines = self._client.lrange(self._keys.events(job_id), 0, -1)
        numbered = (line.partition(" ") for line in lines)
        return [
            Event(int(number), job_from_json(view))
            for number, _, view in numbered
            if int(number) > after
        ]

    @_asks
    def failures(self, job_id: str, shards: Sequence[int]) -> list[Failure]:
        failures = self._client.hmget(self._keys.failures(job_id), shards) if shards else []
        return [failure_from_json(failure) for failure in failures if failure is not None]

    @_asks
    def find_expired(self, *, max_age_s: float, max_jobs: int, limit: int) -> list[Ended]:
        old_s = self._clock.now_s() - max_age_s
        old, extra = (
            self._client.zcount(self._keys.ended, "-inf", old_s),
            self._client.zcard(self._keys.ended) - max_jobs,
        )
        num = min(limit, max(old, extra))
        pairs = (
            self._client.zrange(self._keys.ended, 0, num - 1, withscores=True) if num > 0 else []
        )
        return [Ended(job_id, ended_s) for job_id, ended_s in pairs]

    @_asks
    def count(self) -> dict[JobState, int]:
        counts = {state: self._client.zcard(self._keys.state(state)) for state in _STATES}
        return {state: num for state, num in counts.items() if num}

    @_asks
    def waiting(self) -> int:
        return sum(map(int, self._client.hvals(self._keys.waiting)))

    @_asks
    def oldest_queued_s(self) -> float:
        oldest = self._client.zrange(self._keys.state("queued"), 0, 0)
        record = self._client.get(self._keys.record(oldest[0])) if oldest else None
        queued = Listed.of(oldest[0], record).job if oldest else None
        return 0.0 if queued is None else max(0.0, self._clock.now_s() - queued.created_s)

    @_asks
    def heartbeat(self, worker: str, fingerprint: Fingerprint, *, lease_s: float) -> None:
        now_s = self._clock.now_s()
        self._client.hset(
            self._keys.heartbeats, worker, f"{now_s!r} {now_s + lease_s!r} {fingerprint}"
        )
        heartbeats = self._client.hgetall(self._keys.heartbeats)
        if over := [name for name, last in heartbeats.items() if not _lives(last, now_s)]:
            self._client.hdel(self._keys.heartbeats, *over)

    @_asks
    def live_workers(self) -> dict[str, Fingerprint]:
        now_s = self._clock.now_s()
        heartbeats = self._client.hgetall(self._keys.heartbeats)
        return {
            name: last.split()[-1]
            for name, last in sorted(heartbeats.items())
            if _lives(last, now_s)
        }

    def close(self) -> None:
        self._client.close()

    def drop_connections(self) -> None:
        """Closes idle connections, so that the next ones resolve the host name again."""
        self._client.connection_pool.disconnect(inuse_connections=False)

    def _ends(self, transaction: "_RedisTransaction") -> bool:
        values = [value or "" for value in transaction.read.values()]
        if not transaction.commands and len(values) < 2:  # one answer was there at one moment
            return True
        return bool(
            self._commit(list(transaction.read), [json.dumps(transaction.commands), *values])
        )

    def _check_keeps(self) -> None:
        """Raises ConfigInvalid if Redis may evict jobs; warns if a restart would lose them."""
        if self._keeps:
            return
        policy = str(self._client.info("memory").get("maxmemory_policy", ""))
        if policy.startswith("allkeys"):
            raise ConfigInvalid(
                f"the Redis of the jobs evicts any key when it is full (maxmemory-policy {policy})",
                remedy="set noeviction or volatile-lru there, or name another Redis",
            )
        if not self._client.info("persistence").get("aof_enabled"):
            _log.warning(
                "the Redis of the jobs keeps nothing over a restart:"
                " set appendonly yes, appendfsync always"
            )
        self._client.set(self._keys.schema, _SCHEMA, nx=True)
        if self._client.get(self._keys.schema) != _SCHEMA:
            raise ArtifactInvalid(
                "the job queue in Redis is of another version",
                remedy="name another MLCD_JOBS__REDIS_PREFIX, or another Redis",
            )
        self._keeps = True

    def _read_clock_s(self) -> float:
        seconds, microseconds = self._client.time()
        return float(seconds + microseconds / 1e6)


class _RedisTransaction:
    """A `Transaction`. read: the values that its decision depends on, by key. commands: what it
    will write.
    """

    def __init__(self, client: Any, keys: Keys, clock: Clock) -> None:
        self._client, self._keys, self._clock = client, keys, clock
        self.now_s = clock.now_s()
        self.read: dict[str, str | None] = {}
        self.commands: list[list[str]] = []

    def has_clock_jumped(self, *, within_s: float) -> bool:
        return self._clock.has_clock_jumped(within_s=within_s)

    def record(self, job_id: str) -> StoredJob | None:
        text = self._get(self._keys.record(job_id))
        return None if text is None else record_from_json(text)

    def newest_id(self) -> str | None:
        return self._get(self._keys.newest)

    def save(self, record: StoredJob) -> None:
        key, due = self._keys.record(record.id), self._keys.due(record.spec.fingerprint)
        if key not in self.read:
            self._do("SET", self._keys.newest, record.id)
            self._do("ZADD", self._keys.all, 0, record.id)
        self._do("SET", key, record_to_json(record).decode())
        for state in _STATES:
            if state != record.state:
                self._do("ZREM", self._keys.state(state), record.id)
        self._do("ZADD", self._keys.state(record.state), 0, record.id)
        if record.due_s is None:
            self._do("ZREM", due, record.id)
        else:
            self._do("ZADD", due, record.due_s, record.id)
        if record.due_s is None and record.ended_s is not None:
            self._do("ZADD", self._keys.ended, record.ended_s, record.id)
        else:
            self._do("ZREM", self._keys.ended, record.id)
        if record.waiting:
            self._do("HSET", self._keys.waiting, record.id, record.waiting)
        else:
            self._do("HDEL", self._keys.waiting, record.id)

    def remove(self, record: StoredJob) -> None:
        for key_of in (self._keys.record, self._keys.events, self._keys.sizes, self._keys.failures):
            self._do("DEL", key_of(record.id))
        for key in (
            self._keys.all,
            self._keys.ended,
            self._keys.state(record.state),
            self._keys.due(record.spec.fingerprint),
        ):
            self._do("ZREM", key, record.id)
        self._do("HDEL", self._keys.waiting, record.id)

    def remove_with_names(self, job_id: str) -> None:
        for key_of in (self._keys.record, self._keys.events, self._keys.sizes, self._keys.failures):
            self._do("DEL", key_of(job_id))
        indexes = [self._keys.all, self._keys.ended, *map(self._keys.state, _STATES)]
        for key in (
            *indexes,
            *self._client.scan_iter(self._keys.due("*")),
        ):  # what is in the record cannot be known
            self._do("ZREM", key, job_id)
        self._do("HDEL", self._keys.waiting, job_id)
        for key in self._client.scan_iter(self._keys.name("*")):
            if self._client.get(key) == job_id:
                self._do("DEL", key)

    def publish_event(self, event: Event) -> None:
        key = self._keys.events(event.job.id)
        self._do("RPUSH", key, f"{event.id} {job_to_json(event.job).decode()}")
        self._do("LTRIM", key, -KEPT_EVENTS, -1)

    def holder(self, name: str) -> str | None:
        return self._get(self._keys.name(name))

    def hold(self, name: str, job_id: str) -> None:
        self._do("SET", self._keys.name(name), job_id)

    def let_go(self, name: str) -> None:
        self._do("DEL", self._keys.name(name))

    def size_of(self, job_id: str, shard: int) -> int:
        size = self._client.lindex(self._keys.sizes(job_id), shard)
        if size is None:
            raise RecordDamaged
        return int(size)

    def set_sizes(self, job_id: str, sizes: Sequence[int]) -> None:
        key = self._keys.sizes(job_id)
        self._do("DEL", key)
        for start in range(0, len(sizes), _ARGUMENTS):
            self._do("RPUSH", key, *sizes[start : start + _ARGUMENTS])

    def set_failure(self, job_id: str, failure: Failure) -> None:
        self._do(
            "HSET",
            self._keys.failures(job_id),
            str(failure.shard),
            failure_to_json(failure).decode(),
        )

    def _get(self, key: str) -> str | None:
        if key not in self.read:
            self.read[key] = self._client.get(key)
        return self.read[key]

    def _do(self, *words: str | float) -> None:
        self.commands.append([word if isinstance(word, str) else repr(word) for word in words])


def _lives(heartbeat: str, now_s: float) -> bool:
    reported_s, until_s, _ = heartbeat.split()
    return float(reported_s) <= now_s < float(until_s)
