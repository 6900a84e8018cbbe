"""The usage of keys, in every store."""

import asyncio
import logging
import time
from collections import Counter
from datetime import UTC, date, datetime, timedelta

import pytest

from mlcd.errors import Unavailable
from mlcd.service.keys.file import Key
from mlcd.service.keys.redis_usage import RedisUsage
from mlcd.service.keys.usage import UsageLedger, open_usage
from mlcd.service.keys.usage_stores import MemoryUsage, SqliteUsage
from tests.integration.running import until
from tests.unit.service.cached import redis_server

TODAY = datetime.now(UTC).date()
YESTERDAY = TODAY - timedelta(days=1)
DAY = TODAY.isoformat()


@pytest.fixture(autouse=True)
def _take_the_day_of_the_test():
    """A run of all tests may pass midnight after this file was read."""
    today = datetime.now(UTC).date()
    globals().update(TODAY=today, YESTERDAY=today - timedelta(days=1), DAY=today.isoformat())


def key(number):
    created = datetime.now(UTC)
    return Key(id=f"{number:08x}", name="x", sha256="0" * 64, scopes=["embed"], created=created)


@pytest.fixture
def redis(tmp_path):
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture(params=["memory", "sqlite", "redis"])
def store(request, tmp_path):
    match request.param:
        case "memory":
            return MemoryUsage(400)
        case "sqlite":
            return SqliteUsage(tmp_path / "state" / "usage.sqlite", 400)
        case _:
            return RedisUsage(request.getfixturevalue("redis").url, 400)


async def test_counts_add_up_by_key_and_day_over_servers(store):
    ledgers = [UsageLedger(store, today=lambda: TODAY) for _ in range(2)]
    for ledger in ledgers:
        ledger.count(key(1), {"requests": 1, "images": 3, "bytes": 100})
        ledger.count(key(1), {"requests": 1, "texts": 2, "tokens": 9, "bytes": 50})
        ledger.count(None, {"requests": 1, "images": 1, "bytes": 10})
        await ledger.flush()
        ledger.count(key(2), {"requests": 1, "images": 0, "bytes": 7})
    await ledgers[0].flush()
    usage = await ledgers[1].read(TODAY, TODAY)  # what was just counted is in it
    assert usage == {
        (DAY, "00000001"): Counter(requests=4, images=6, texts=4, tokens=18, bytes=300),
        (DAY, "00000002"): Counter(requests=2, images=0, bytes=14),
        (DAY, ""): Counter(requests=2, images=2, bytes=20),
    }


async def test_a_request_counts_on_the_day_on_which_it_ends(store):
    days = iter([YESTERDAY, TODAY])
    ledger = UsageLedger(store, today=lambda: next(days))
    ledger.count(None, {"images": 1})
    ledger.count(None, {"images": 2})
    expected = {(YESTERDAY.isoformat(), ""): Counter(images=1), (DAY, ""): Counter(images=2)}
    assert await ledger.read(YESTERDAY, TODAY) == expected
    assert [*await ledger.read(YESTERDAY, YESTERDAY)] == [(YESTERDAY.isoformat(), "")]
    assert [*await ledger.read(TODAY, TODAY)] == [(DAY, "")]
    assert await ledger.read(date.min, date.max) == expected


async def test_days_that_are_over_are_removed(tmp_path, redis):
    path = tmp_path / "usage.sqlite"
    for store in (MemoryUsage(10), SqliteUsage(path, 10), RedisUsage(redis.url, 10)):
        for days in (11, 10, 0):
            day = TODAY - timedelta(days=days)
            ledger = UsageLedger(store, today=lambda day=day: day)
            ledger.count(None, {"images": 1})
            await ledger.flush()
        kept = {((TODAY - timedelta(days=10)).isoformat(), ""), (DAY, "")}
        assert set(await ledger.read(date.min, date.max)) == kept, store.kind
    assert redis.num_keys() == 1 + 2 + 3  # with the ids of what was added


async def test_a_redis_that_evicts_what_has_a_time_to_live_keeps_the_counts(redis):
    ledger = UsageLedger(RedisUsage(redis.url, 10))
    ledger.count(None, {"images": 1})
    await ledger.flush()
    for name in ("days", DAY):
        assert redis.ask("TTL", f"mlcd:usage:{name}") == b":-1\r\n"
    batch = redis.ask("KEYS", "mlcd:usage:batch:*").split(b"\r\n")[2].decode()
    assert 0 < int(redis.ask("TTL", batch).strip(b":\r\n")) <= 86400


async def count_while_away(ledger, caplog):
    """Counts while the store is away: quickly, and with one line in the log."""
    caplog.clear()
    started = time.monotonic()
    for _ in range(100):
        ledger.count(None, {"images": 1})
    assert time.monotonic() - started < 0.2
    with caplog.at_level(logging.WARNING):
        await ledger.flush()
        ledger.count(None, {"images": 1})
        await ledger.flush()
    assert len(caplog.records) == 1
    with pytest.raises(Unavailable):
        await ledger.read(TODAY, TODAY)


async def test_counts_wait_in_memory_for_a_redis_that_is_down(redis, caplog):
    ledger = UsageLedger(RedisUsage(redis.url, 400))
    await ledger.read(TODAY, TODAY)
    redis.stop()
    await count_while_away(ledger, caplog)
    redis.start()
    assert await ledger.read(TODAY, TODAY) == {(DAY, ""): Counter(images=101)}


async def test_counts_whose_answer_was_lost_are_added_once(redis, caplog):
    ledger = UsageLedger(RedisUsage(redis.url, 400))
    await ledger.read(TODAY, TODAY)  # the connection is open: a frozen server has the command
    redis.freeze()
    await count_while_away(ledger, caplog)
    redis.thaw()
    assert await ledger.read(TODAY, TODAY) == {(DAY, ""): Counter(images=101)}


async def test_counts_wait_in_memory_for_a_file_that_is_damaged(tmp_path, caplog):
    path = tmp_path / "usage.sqlite"
    path.write_bytes(b"damaged" * 1000)
    ledger = UsageLedger(SqliteUsage(path, 400))
    await count_while_away(ledger, caplog)
    path.unlink()
    usage = await ledger.read(TODAY, TODAY)
    assert usage[DAY, ""]["images"] == 101


async def test_counts_are_stored_every_few_seconds_and_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("mlcd.service.keys.usage.USAGE_FLUSH_S", 0.05)
    stored = SqliteUsage(tmp_path / "usage.sqlite", 400)
    async with open_usage(None, tmp_path, keep_days=400) as ledger:
        assert ledger.store.kind == "sqlite"
        await asyncio.sleep(0.2)
        assert not (tmp_path / "usage.sqlite").exists()  # nothing was counted
        ledger.count(None, {"images": 1})
        await asyncio.to_thread(until, lambda: stored.read(TODAY, TODAY), 10)
        ledger.count(None, {"images": 1})
    assert stored.read(TODAY, TODAY)[DAY, ""]["images"] == 2


async def test_the_end_does_not_wait_for_a_store_that_hangs(redis):
    async with open_usage(redis.url, None, keep_days=400) as ledger:
        assert ledger.store.kind == "redis"
        ledger.count(None, {"images": 1})
        redis.freeze()
        started = time.monotonic()
    assert time.monotonic() - started < 1.5
    redis.thaw()


async def test_without_redis_and_state_counts_end_with_the_process():
    async with open_usage(None, None, keep_days=400) as ledger:
        assert ledger.store.kind == "memory"
