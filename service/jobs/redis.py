"""The queue's database in Redis: several machines share one queue. Its clock alone decides on leases.

What it holds: `redis_keys`.

A transaction reads records and names, decides, and then writes by one script, which does nothing where any of what was
read is another by then: it is run again. What Redis has answered is as durable as its settings say.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from mlcd.errors import ConfigInvalid, MlcdError, Unavailable
from mlcd.types import Fingerprint
from service.jobs.job import Event, Failure, Job, JobState
from service.jobs.record import (
    Record,
    failure_from_json,
    failure_to_json,
    job_from_json,
    job_to_json,
    record_from_json,
    record_to_json,
)
from service.jobs.records import KEPT_EVENTS, Ended, Result
from service.jobs.redis_keys import (
    ALL,
    ENDED,
    NEWEST,
    WAITING,
    WORKERS,
    due_key,
    events_key,
    failures_key,
    name_key,
    record_key,
    sizes_key,
    state_key,
)

_STATES: Final[tuple[JobState, ...]] = ("queued", "running", "succeeded", "failed", "canceled")
_CONNECT_TIMEOUT_S: Final = 2.0
_TIMEOUT_S: Final = 5.0
"""Of one command: with appendfsync always it waits for the disk."""
_CANDIDATES: Final = 16
"""Jobs that a claim tries: more than one only where others claim at the same moment."""
_ARGUMENTS: Final = 1000
"""Of one command in the script: Lua unpacks a few thousand at most."""
_COMMIT: Final = """
for place, key in ipairs(KEYS) do
  if (redis.call('GET', key) or '') ~= ARGV[place + 1] then return 0 end
end
for _, command in ipairs(cjson.decode(ARGV[1])) do redis.call(unpack(command)) end
return 1
"""
"""KEYS: what was read; ARGV: the commands as JSON, then what each key held, empty where there was none."""

_log = logging.getLogger("mlcd.service")


def open_redis_records(url: str) -> "RedisRecords":
    """Connects when it is used first. Raises ConfigInvalid for a URL that is none of Redis."""
    try:
        client = Redis.from_url(
            url,
            decode_responses=True,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # a write whose answer is lost may have been done
        )
    except ValueError:  # its text may quote the password
        raise ConfigInvalid("MLCD_REDIS_URL is no Redis URL", remedy="give redis://host:port/database") from None
    return RedisRecords(client)


class RedisRecords:
    """See `Records`. Threads and processes may share one Redis."""

    def __init__(self, client: Redis) -> None:
        self._client: Any = client  # its types do not know that answers are decoded
        self._commit = client.register_script(_COMMIT)
        self._keeps = False

    def transact(self, step: Callable[["_Transaction"], Result]) -> Result:
        with _translated():
            self._check_keeps()
            while True:
                transaction = _Transaction(self._client)
                try:
                    result = step(transaction)
                except MlcdError:  # for good only if what it read was there at one moment
                    transaction.commands.clear()
                    if self._ends(transaction):
                        raise
                else:
                    if self._ends(transaction):
                        return result

    def read(self, job_id: str) -> Record | None:
        with _translated():
            found = self._client.get(record_key(job_id))
        return None if found is None else record_from_json(found)

    def due(self, fingerprints: Sequence[Fingerprint], *, leaving: Collection[str] = ()) -> list[str]:
        num = _CANDIDATES + len(leaving)
        with _translated():
            found: set[str] = set()
            now_s = _now_s(self._client)
            for key in map(due_key, fingerprints):
                # Pieces that wait are due from 0 on, the oldest job first; leases and pauses end at their own moments.
                found |= set(self._client.zrangebyscore(key, 0, 0, 0, num))
                found |= set(self._client.zrangebyscore(key, "(0", now_s, 0, num))
        return sorted(found.difference(leaving))[:_CANDIDATES]

    def page(self, *, limit: int, below: str | None, state: JobState | None) -> list[Job]:
        key = ALL if state is None else state_key(state)
        with _translated():
            ids = self._client.zrevrangebylex(key, "+" if below is None else f"({below}", "-", 0, limit)
            found = self._client.mget(map(record_key, ids)) if ids else []
        return [record_from_json(record).job for record in found if record is not None]

    def events(self, job_id: str, after: int) -> list[Event]:
        with _translated():
            kept = self._client.lrange(events_key(job_id), 0, -1)
        numbered = (line.partition(" ") for line in kept)
        return [Event(int(number), job_from_json(view)) for number, _, view in numbered if int(number) > after]

    def failures(self, job_id: str, shards: Sequence[int]) -> list[Failure]:
        with _translated():
            found = self._client.hmget(failures_key(job_id), shards) if shards else []
        return [failure_from_json(failure) for failure in found if failure is not None]

    def ended(self, *, longer_than_s: float, more_than: int, limit: int) -> list[Ended]:
        with _translated():
            old_s = _now_s(self._client) - longer_than_s
            old, extra = self._client.zcount(ENDED, "-inf", old_s), self._client.zcard(ENDED) - more_than
            num = min(limit, max(old, extra))
            found = self._client.zrange(ENDED, 0, num - 1, withscores=True) if num > 0 else []
        return [Ended(job_id, ended_s) for job_id, ended_s in found]

    def count(self) -> dict[JobState, int]:
        with _translated():
            counts = {state: self._client.zcard(state_key(state)) for state in _STATES}
        return {state: num for state, num in counts.items() if num}

    def waiting(self) -> int:
        with _translated():
            return sum(map(int, self._client.hvals(WAITING)))

    def oldest_queued_s(self) -> float:
        with _translated():
            oldest = self._client.zrange(state_key("queued"), 0, 0)
            record = self.read(oldest[0]) if oldest else None
            return 0.0 if record is None else max(0.0, _now_s(self._client) - record.created_s)

    def beat(self, worker: str, *, lease_s: float) -> None:
        with _translated():
            now_s = _now_s(self._client)
            self._client.zadd(WORKERS, {worker: now_s + lease_s})
            self._client.zremrangebyscore(WORKERS, "-inf", now_s)

    def beating(self) -> list[str]:
        with _translated():
            return sorted(self._client.zrangebyscore(WORKERS, f"({_now_s(self._client)}", "+inf"))

    def close(self) -> None:
        self._client.close()

    def _ends(self, transaction: "_Transaction") -> bool:
        held = [value or "" for value in transaction.read.values()]
        if not transaction.commands and len(held) < 2:  # one answer was there at one moment
            return True
        return bool(self._commit(list(transaction.read), [json.dumps(transaction.commands), *held]))

    def _check_keeps(self) -> None:
        """Raises ConfigInvalid where Redis may throw jobs away; warns where a restart would."""
        if self._keeps:
            return
        policy = str(self._client.info("memory").get("maxmemory_policy", ""))
        if policy.startswith("allkeys"):
            raise ConfigInvalid(
                f"the Redis of the jobs throws any key away when it is full (maxmemory-policy {policy})",
                remedy="set noeviction or volatile-lru there, or name another Redis",
            )
        if not self._client.info("persistence").get("aof_enabled"):
            _log.warning("the Redis of the jobs keeps nothing over a restart: set appendonly yes, appendfsync always")
        self._keeps = True


class _Transaction:
    """See `Transaction`. read: what its decision rests on, key by key; commands: what is to be done."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.now_s = _now_s(client)
        self.read: dict[str, str | None] = {}
        self.commands: list[list[str]] = []

    def record(self, job_id: str) -> Record | None:
        found = self._get(record_key(job_id))
        return None if found is None else record_from_json(found)

    def newest_id(self) -> str | None:
        return self._get(NEWEST)

    def save(self, record: Record) -> None:
        key, due = record_key(record.id), due_key(record.spec.fingerprint)
        if key not in self.read:
            self._do("SET", NEWEST, record.id)
            self._do("ZADD", ALL, 0, record.id)
        self._do("SET", key, record_to_json(record).decode())
        for state in _STATES:
            if state != record.state:
                self._do("ZREM", state_key(state), record.id)
        self._do("ZADD", state_key(record.state), 0, record.id)
        if record.due_s is None:
            self._do("ZREM", due, record.id)
        else:
            self._do("ZADD", due, record.due_s, record.id)
        if record.due_s is None and record.ended_s is not None:
            self._do("ZADD", ENDED, record.ended_s, record.id)
        else:
            self._do("ZREM", ENDED, record.id)
        if record.waiting:
            self._do("HSET", WAITING, record.id, record.waiting)
        else:
            self._do("HDEL", WAITING, record.id)

    def remove(self, record: Record) -> None:
        for key_of in (record_key, events_key, sizes_key, failures_key):
            self._do("DEL", key_of(record.id))
        for key in (ALL, ENDED, state_key(record.state), due_key(record.spec.fingerprint)):
            self._do("ZREM", key, record.id)
        self._do("HDEL", WAITING, record.id)

    def tell(self, event: Event) -> None:
        key = events_key(event.job.id)
        self._do("RPUSH", key, f"{event.id} {job_to_json(event.job).decode()}")
        self._do("LTRIM", key, -KEPT_EVENTS, -1)

    def holder(self, name: str) -> str | None:
        return self._get(name_key(name))

    def hold(self, name: str, job_id: str) -> None:
        self._do("SET", name_key(name), job_id)

    def let_go(self, name: str) -> None:
        self._do("DEL", name_key(name))

    def size_of(self, job_id: str, shard: int) -> int:
        return int(self._client.lindex(sizes_key(job_id), shard))

    def set_sizes(self, job_id: str, sizes: Sequence[int]) -> None:
        key = sizes_key(job_id)
        self._do("DEL", key)
        for start in range(0, len(sizes), _ARGUMENTS):
            self._do("RPUSH", key, *sizes[start : start + _ARGUMENTS])

    def set_failure(self, job_id: str, failure: Failure) -> None:
        self._do("HSET", failures_key(job_id), str(failure.shard), failure_to_json(failure).decode())

    def _get(self, key: str) -> str | None:
        if key not in self.read:
            self.read[key] = self._client.get(key)
        return self.read[key]

    def _do(self, *words: str | float) -> None:
        self.commands.append([word if isinstance(word, str) else repr(word) for word in words])


def _now_s(client: Any) -> float:
    seconds, microseconds = client.time()
    return float(seconds + microseconds / 1e6)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise Unavailable(
            "the job queue's Redis does not answer, or takes no writes", remedy="come back soon; what it has is kept"
        ) from error
