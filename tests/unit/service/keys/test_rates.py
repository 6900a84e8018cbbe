"""Images a minute, for each key by itself."""

import asyncio
import contextlib
import functools
import logging
import re
import time
from datetime import UTC, datetime

import pytest

from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.service.errors import RateExceeded
from mlcd.service.keys import rates
from mlcd.service.keys.file import Key
from mlcd.service.keys.rates import RateLimiter, RequestAccount, open_rate_limiter
from tests.unit.service.cached import RedisServer, redis_server
from tests.unit.service.engines import new_metrics, sample


def key(number=1, rate=10):
    return Key(
        id=f"{number:08x}",
        name="x",
        sha256="0" * 64,
        scopes=["embed"],
        rate=rate,
        created=datetime.now(UTC),
    )


async def accepted(rates, who, *requests):
    found = []
    for num in requests:
        try:
            await rates.take(who, num)
            found.append(num)
        except RateExceeded:
            pass
    return found


async def test_as_many_images_as_the_rate_and_no_more():
    metrics = new_metrics()
    rates = RateLimiter(metrics=metrics)
    assert await accepted(rates, key(), 4, 4, 4, 2, 1) == [4, 4, 2]
    assert sample(metrics, 'mlcd_rejected_total{reason="rate"}') == 2
    assert await accepted(rates, key(2), 10, 1) == [10]
    for free in (None, key(3, rate=None)):
        assert await accepted(rates, free, 1000, 1000) == [1000, 1000]


async def test_headers_say_the_rate_and_what_is_left_of_it():
    rates = RateLimiter(metrics=new_metrics())

    async def said(who, retry_after_s=None):
        headers = dict(await rates.headers(who, retry_after_s))
        if headers:
            assert headers.pop(b"ratelimit-policy") == b'"default";q=10;w=60;qu="images"'
        return headers

    def left(num, headers):
        found = re.fullmatch(rb'"default";r=(\d+);t=(\d+)', headers[b"ratelimit"])
        return int(found[1]) == num and 1 <= int(found[2]) <= 60

    assert left(10, await said(key()))
    await rates.take(key(), 3)
    assert left(7, await said(key()))
    assert left(7, await said(key()))
    assert await said(key(), 42) == {b"ratelimit": b'"default";r=7;t=42'}
    await rates.take(key(), 7)
    assert left(0, await said(key()))
    assert left(10, await said(key(2)))
    for free in (None, key(3, rate=None)):
        assert await said(free) == {}


async def test_a_request_that_could_never_pass_is_told_so():
    rates = RateLimiter(metrics=new_metrics())
    with pytest.raises(
        InvalidInput, match="may send 10 images a minute, and this request counts as 11"
    ):
        await rates.take(key(), 11)
    assert await accepted(rates, key(), 10) == [10]


async def test_after_the_seconds_it_says_a_request_passes_and_not_before(monkeypatch):
    """With the clock of the library moved; whatever was sent before, in this minute or the last."""
    start = 1_800_000_000.0
    now = start
    monkeypatch.setattr("limits.aio.storage.memory.time.time", lambda: now)
    for first_at, first, second_at, second, asked in [
        (0, 8, 1, 2, 3),
        (5, 10, 6, 0, 10),
        (30, 6, 70, 6, 5),
        (59, 10, 61, 0, 4),
        (10, 3, 65, 8, 1),
    ]:
        rates = RateLimiter(metrics=new_metrics())
        now = start + first_at
        await rates.take(key(), first)
        now = start + second_at
        with contextlib.suppress(RateExceeded):
            await rates.take(key(), second)
        with pytest.raises(RateExceeded) as caught:
            await rates.take(key(), asked)
        stated = int(caught.value.headers["Retry-After"])
        now = start + second_at + stated - 1.02
        assert await accepted(rates, key(), asked) == []
        now = start + second_at + stated
        assert await accepted(rates, key(), asked) == [asked]


def account(rates, who, taken):
    return RequestAccount(rates, who, num_counted=taken, pixels_per_image=100)


async def test_a_large_picture_counts_as_often_as_it_has_pixels_of_one():
    rates = RateLimiter(metrics=new_metrics())
    await rates.take(key(), 3)
    await account(rates, key(), 3).charge([0, 1, 100, 101, 200, 201, 1, 350])  # 0 0 0 1 1 2 0 3
    with pytest.raises(
        InvalidInput, match="may send 10 images a minute, and this request counts as 11"
    ):
        await account(rates, key(), 2).charge([1000])
    assert await accepted(rates, key(), 1) == []
    for free in (None, key(3, rate=None)):
        await account(rates, free, 1).charge([10**9])
    assert (
        account(rates, key(), 1).owner
        == account(rates, key(), 1).owner
        != account(rates, key(2), 1).owner
    )
    assert account(rates, None, 1).owner != account(rates, None, 1).owner


async def test_after_the_seconds_it_says_the_whole_request_passes(monkeypatch):
    now = 1_800_000_000.0
    monkeypatch.setattr("limits.aio.storage.memory.time.time", lambda: now)
    rates = RateLimiter(metrics=new_metrics())
    await rates.take(key(), 7)
    now += 20
    await rates.take(key(), 2)
    with pytest.raises(RateExceeded) as caught:
        await account(rates, key(), 2).charge([501, 1])
    now += int(caught.value.headers["Retry-After"])
    await rates.take(key(), 2)
    await account(rates, key(), 2).charge([501, 1])


@pytest.mark.redis
async def test_servers_with_one_redis_count_together(tmp_path):
    with redis_server(tmp_path) as server:
        async with (
            open_rate_limiter(server.url, metrics=new_metrics()) as one,
            open_rate_limiter(server.url, metrics=new_metrics()) as other,
        ):
            assert await accepted(one, key(), 6) == [6]
            assert await accepted(other, key(), 6, 4, 1) == [4]
            with pytest.raises(RateExceeded) as caught:
                await other.take(key(), 1)
            assert 1 <= int(caught.value.headers["Retry-After"]) <= 120
            assert await accepted(one, key(2), 10) == [10]
        assert b"00000001" in server.ask("KEYS", "*")


FAULTS = {
    "stopped": (RedisServer.stop, RedisServer.start),
    "frozen": (RedisServer.freeze, RedisServer.thaw),
    "full": tuple(
        lambda server, most=most: server.ask("CONFIG", "SET", "maxmemory", most)
        for most in ("1", "0")
    ),
}


@pytest.mark.redis
@pytest.mark.parametrize("fault", FAULTS)
async def test_without_redis_each_server_counts_for_itself_and_comes_back(
    tmp_path, fault, monkeypatch, caplog
):
    monkeypatch.setattr(rates, "RATE_REDIS_REST_S", 0.3)
    wait = functools.partial(monkeypatch.setattr, rates, "RATE_REDIS_S")
    usual, (begin, end) = rates.RATE_REDIS_S, FAULTS[fault]
    wait(5.0)  # a Redis that is well answers, however busy the machine
    with redis_server(tmp_path) as server, caplog.at_level(logging.WARNING):
        async with open_rate_limiter(server.url, metrics=new_metrics()) as limiter:
            assert await accepted(limiter, key(), 6) == [6]
            wait(usual)
            begin(server)
            started = time.monotonic()
            # One that is full still knows what was sent before.
            assert await accepted(limiter, key(), 6, 4, 1) == (
                [4, 1] if fault == "full" else [6, 4]
            )
            assert await accepted(limiter, key(2), *[1] * 20) == [1] * 10
            assert time.monotonic() - started < 3
            end(server)
            wait(5.0)
            await asyncio.sleep(0.4)
            held = 0 if fault == "stopped" else 6
            assert await accepted(limiter, key(), *[1] * 12) == [1] * (10 - held)
    told = [
        record.message for record in caplog.records if "Redis for rate limits" in record.message
    ]
    assert [("answers again" in line) for line in told] == [False, True]


async def test_a_redis_that_is_not_there_at_start_fails_nothing():
    async with open_rate_limiter("redis://127.0.0.1:1/0", metrics=new_metrics()) as rates:
        assert await accepted(rates, key(), 6, 6) == [6]


async def test_a_url_of_something_else_is_refused_and_not_repeated():
    with pytest.raises(ConfigInvalid, match="MLCD_REDIS_URL") as caught:
        async with open_rate_limiter("http://user:SECRET@host", metrics=new_metrics()):
            pass
    assert "SECRET" not in str(caught.value)
    assert caught.value.__cause__ is None
