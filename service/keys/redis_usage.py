"""The store of usage in a Redis that several servers share.

mlcd:usage:days      set of the days that have counts
mlcd:usage:DAY       hash: KEY:KIND to a count
mlcd:usage:batch:ID  counts that were added, for a while

Days are stored without a time to live: a Redis that is shared with a cache may evict what has one.
"""

import json
from collections import Counter
from collections.abc import Callable
from datetime import date, timedelta
from typing import Final, TypeVar

from redis import Redis
from redis.exceptions import RedisError

from mlcd.errors import Unavailable
from mlcd.service.keys.usage_stores import Usage, oldest_day
from mlcd.service.redis_clients import open_redis_pool
from mlcd.service.timings import DAY_S, USAGE_REDIS_S

_PREFIX: Final = "mlcd:usage:"
_DAYS: Final = f"{_PREFIX}days"
# KEYS: that of the batch. ARGV: seconds until it is forgotten, the commands as JSON.
_ADD: Final = """
if redis.call('SET', KEYS[1], '1', 'NX', 'EX', ARGV[1]) then
  for _, command in ipairs(cjson.decode(ARGV[2])) do redis.call(unpack(command)) end
end
"""
_Answer = TypeVar("_Answer")


class RedisUsage:
    """A `UsageStore` in Redis."""

    kind: Final = "redis"

    def __init__(self, url: str, keep_days: int) -> None:
        """Prepares the connections. Raises ConfigInvalid for a malformed URL."""
        self._keep_days = keep_days
        self._pool = open_redis_pool(
            url,
            decode_responses=True,
            socket_connect_timeout=USAGE_REDIS_S,
            socket_timeout=USAGE_REDIS_S,
        )
        self._client = Redis(connection_pool=self._pool)

    def add(self, batch_id: str, usage: Usage) -> None:
        oldest = oldest_day(self._keep_days)
        commands = []
        for day in self._find_days(date.min, oldest - timedelta(days=1)):
            commands += [["DEL", f"{_PREFIX}{day}"], ["SREM", _DAYS, day]]
        for (day, key), counts in usage.items():
            commands.append(["SADD", _DAYS, day])
            commands += [
                ["HINCRBY", f"{_PREFIX}{day}", f"{key}:{kind}", str(num)]
                for kind, num in counts.items()
            ]
        arguments = (f"{_PREFIX}batch:{batch_id}", str(int(DAY_S)), json.dumps(commands))
        self._ask(lambda: self._client.eval(_ADD, 1, *arguments))

    def read(self, first: date, last: date) -> Usage:
        days = self._find_days(first, last)
        usage: Usage = {}
        for day, counts in zip(days, self._ask(lambda: self._read_hashes(days)), strict=True):
            for field, num in counts.items():
                key, _, kind = field.rpartition(":")
                usage.setdefault((day, key), Counter())[kind] = int(num)
        return usage

    def _find_days(self, first: date, last: date) -> list[str]:
        days = map(str, self._ask(lambda: self._client.smembers(_DAYS)))
        return sorted(day for day in days if first.isoformat() <= day <= last.isoformat())

    def _read_hashes(self, days: list[str]) -> list[dict[str, str]]:
        pipeline = self._client.pipeline(transaction=False)
        for day in days:
            pipeline.hgetall(f"{_PREFIX}{day}")
        return pipeline.execute()

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        try:
            return call()
        except (RedisError, OSError) as error:
            self._pool.disconnect()  # after a failover the name leads to another server
            raise Unavailable(
                "the Redis with the usage of keys does not answer", remedy="come back soon"
            ) from error
