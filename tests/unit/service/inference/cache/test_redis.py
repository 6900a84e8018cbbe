"""The part of the cache that is in Redis, with a real one."""

import asyncio
import random
import time

import numpy as np
import pytest

from mlcd.errors import ConfigInvalid
from mlcd.service.inference.cache.vectors import VectorFormat
from tests.unit.service.cached import (
    PREFIX,
    RedisServer,
    answering,
    delayed,
    redis_cache,
    redis_server,
    space,
)
from tests.unit.service.engines import new_metrics, run, sample, until

pytestmark = pytest.mark.redis


def unit(number):
    return np.eye(3, dtype=np.float32)[number]


PACKED = VectorFormat(3).pack(np.array([0.6, 0.8, 0], np.float32))
KEYS = space().keys([b"a", b"b", b"c"])


@pytest.fixture
def server(tmp_path):
    with redis_server(tmp_path) as running:
        yield running


def counts(metrics):
    results = ("hit", "miss", "damaged", "error")
    return [
        sample(metrics, f'mlcd_cache_requests_total{{result="{result}",tier="redis"}}')
        for result in results
    ]


def written(metrics, result="written"):
    return sample(metrics, f'mlcd_cache_writes_total{{result="{result}"}}')


async def written_by(cache, metrics, keys=KEYS):
    """Write and wait until it is done."""
    before = written(metrics)
    for key in keys:
        cache.put(key, PACKED)
    await until(lambda: written(metrics) == before + len(keys))


async def test_what_one_server_writes_another_finds_until_it_expires(server):
    metrics = new_metrics()
    async with (
        redis_cache(server, metrics, ttl_s=100) as writing,
        redis_cache(server, metrics) as reading,
    ):
        assert await reading.find(KEYS) == {}
        await written_by(writing, metrics, KEYS[:2])
        assert await reading.find(KEYS) == {KEYS[0]: PACKED, KEYS[1]: PACKED}
        assert counts(metrics) == [2, 4, 0, 0]
        assert sample(metrics, "mlcd_cache_up") == 1
    assert 0 < int(server.ask("TTL", PREFIX + KEYS[0].hex()).strip(b":\r\n")) <= 100


async def test_foreign_and_damaged_values_are_misses(server):
    metrics, names = new_metrics(), [PREFIX + key.hex() for key in KEYS]
    async with redis_cache(server, metrics) as cache:
        await written_by(cache, metrics)
        server.ask("COPY", names[0], names[1], "REPLACE")  # the vector of another image
        server.ask("SETRANGE", names[2], "40", "x")
        assert await cache.find(KEYS) == {KEYS[0]: PACKED}
        assert counts(metrics) == [1, 0, 2, 0]
        server.ask("SET", names[1], "foreign")
        server.ask("DEL", names[2])
        server.ask("LPUSH", names[2], "1")
        assert await cache.find(KEYS) == {KEYS[0]: PACKED}
        await written_by(cache, metrics)
        assert len(await cache.find(KEYS)) == 3


async def test_a_frozen_redis_costs_its_timeout_three_times_and_nothing_then(server):
    metrics = new_metrics()
    async with redis_cache(server, metrics, timeout_s=0.1) as cache:
        await written_by(cache, metrics)
        server.freeze()
        took = []
        for _ in range(20):
            started = time.perf_counter()
            assert await cache.find(KEYS) == {}
            took.append(time.perf_counter() - started)
        assert sum(seconds > 0.09 for seconds in took) == 3
        assert sample(metrics, "mlcd_cache_up") == 0
        assert counts(metrics)[3] == 60
        cache.put(KEYS[0], PACKED)
        await until(lambda: written(metrics, "dropped") == 1)
        server.thaw()
        await until(lambda: sample(metrics, "mlcd_cache_up") == 1)
        assert len(await cache.find(KEYS)) == 3


async def test_a_distant_redis_may_take_its_time_to_connect(server):
    metrics = new_metrics()
    async with delayed(server) as way:
        way.delay_s = 0.2  # the handshake alone is several answers
        async with redis_cache(way, metrics, timeout_s=0.35) as cache:
            await written_by(cache, metrics)
            assert len(await cache.find(KEYS)) == 3
            server.ask("CLIENT", "KILL", "TYPE", "normal")
            for _ in range(4):
                await cache.find(KEYS)
            await until(lambda: sample(metrics, "mlcd_cache_up") == 1)
            assert len(await cache.find(KEYS)) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"+OK\r\n",
        b"*-5\r\n",
        b":x\r\n",
        b"$5\r\nab",
        b"%1\r\n",
        b"*1\r\n" * 2000,
    ],
)
async def test_what_is_no_redis_is_not_used(content):
    metrics = new_metrics()
    async with (
        answering(content) as strange,
        redis_cache(strange, metrics, timeout_s=0.05) as cache,
    ):
        for _ in range(5):
            assert await cache.find(KEYS) == {}
            cache.put(KEYS[0], PACKED)
        await until(lambda: written(metrics, "dropped") + written(metrics, "error") == 5)
        assert sample(metrics, "mlcd_cache_up") == 0


async def test_a_redis_that_is_gone_or_not_there_yet_is_used_when_it_is_there(server):
    metrics = new_metrics()
    server.stop()
    async with redis_cache(server, metrics) as cache:
        assert await cache.find(KEYS) == {}
        assert counts(metrics)[3] == 3
        await asyncio.to_thread(server.start)
        await until(lambda: sample(metrics, "mlcd_cache_up") == 1)
        await written_by(cache, metrics)
        assert len(await cache.find(KEYS)) == 3
        server.stop()
        for _ in range(4):
            assert await cache.find(KEYS) == {}
        await asyncio.to_thread(server.start)
        await until(lambda: sample(metrics, "mlcd_cache_up") == 1)
        assert await cache.find(KEYS) == {}


def test_a_full_redis_refuses_writes_and_goes_on_answering(tmp_path):
    async def scenario(server):
        metrics = new_metrics()
        async with redis_cache(server, metrics) as cache:
            await written_by(cache, metrics)
            server.ask("CONFIG", "SET", "maxmemory", "1")
            for key in space().keys([b"%d" % number for number in range(10)]):
                cache.put(key, PACKED)
            await until(lambda: written(metrics, "error") == 10)
            assert len(await cache.find(KEYS)) == 3
            assert sample(metrics, "mlcd_cache_up") == 1
            server.ask("CONFIG", "SET", "maxmemory", "0")
            await written_by(cache, metrics)

    with redis_server(tmp_path, "--maxmemory-policy", "noeviction") as server:
        run(scenario(server))


def used_bytes(server):
    return int(server.ask("INFO", "memory").split(b"used_memory:")[1].split(b"\r")[0])


async def test_beyond_the_operators_bound_nothing_is_written_until_there_is_room(server):
    metrics = new_metrics()
    bound = used_bytes(server) + 2**22  # connections take some
    async with redis_cache(server, metrics, max_bytes=bound) as cache:
        await written_by(cache, metrics)
        server.ask("SETRANGE", "others", str(2**22), "x")
        await asyncio.sleep(1.1)
        for key in KEYS:
            cache.put(key, PACKED)
        await until(lambda: written(metrics, "full") == len(KEYS))
        assert len(await cache.find(KEYS)) == len(KEYS)  # those from before
        assert sample(metrics, "mlcd_cache_up") == 1
        server.ask("DEL", "others")
        await asyncio.sleep(1.1)
        await written_by(cache, metrics)
        assert written(metrics, "error") == 0


@pytest.mark.parametrize(("max_bytes", "num"), [(2**40, 1), (None, 0)])
async def test_a_redis_is_asked_how_full_it_is_once_a_second_if_there_is_a_bound(
    server, max_bytes, num
):
    metrics = new_metrics()
    server.ask("CONFIG", "RESETSTAT")
    async with redis_cache(server, metrics, max_bytes=max_bytes) as cache:
        for _ in range(5):
            await written_by(cache, metrics)
    asked = (
        server.ask("INFO", "commandstats").partition(b"cmdstat_info:calls=")[2].partition(b",")[0]
    )
    assert int(asked or 0) == num


async def test_a_redis_that_does_not_tell_how_full_it_is_is_not_written_to(server):
    metrics = new_metrics()
    server.ask("ACL", "SETUSER", "default", "-info")
    async with redis_cache(server, metrics, max_bytes=2**40) as cache:
        for _ in range(5):
            cache.put(KEYS[0], PACKED)
            await asyncio.sleep(0.05)
        await until(lambda: written(metrics, "error") == 5)
        assert await cache.find(KEYS) == {}
        assert sample(metrics, "mlcd_cache_up") == 1


async def test_a_crowd_is_looked_up_in_a_few_round_trips(server):
    metrics = new_metrics()
    async with redis_cache(server, metrics) as cache:
        keys = space().keys([b"%d" % number for number in range(300)])
        await written_by(cache, metrics, keys)
        found = await asyncio.gather(*[cache.find([key]) for key in keys])
        assert found == [{key: PACKED} for key in keys]
        assert b"calls=2," in server.ask("INFO", "commandstats").split(b"cmdstat_mget:")[1]


async def test_what_cannot_be_written_in_time_is_left_out(server):
    metrics = new_metrics()
    async with redis_cache(server, metrics) as cache:
        for number in range(5000):  # none is written before the loop gets a turn
            cache.put(number.to_bytes(32, "big"), PACKED)
        assert written(metrics, "dropped") == 5000 - 2048
        await until(lambda: written(metrics) == 2048)
    assert server.num_keys() == 2048


async def test_answers_that_come_too_late_are_never_those_of_another_image(server):
    metrics, draw = new_metrics(), random.Random(0)
    async with delayed(server) as way, redis_cache(way, metrics, timeout_s=0.05) as cache:
        vectors = {key: VectorFormat(3).pack(unit(number)) for number, key in enumerate(KEYS)}
        async with redis_cache(server, metrics) as patient:
            for key, packed in vectors.items():
                patient.put(key, packed)
            await until(lambda: written(metrics) == len(KEYS))
        for _ in range(40):
            way.delay_s = draw.uniform(0, 0.08)
            key = draw.choice(KEYS)
            assert await cache.find([key]) in ({}, {key: vectors[key]})
        assert counts(metrics)[2] == 0


async def test_a_connection_that_is_out_of_step_is_made_anew(server):
    metrics = new_metrics()
    async with redis_cache(server, metrics) as cache:
        await written_by(cache, metrics)
        connection = await cache._client.connection_pool.get_connection()
        await connection.send_command(
            "GET", PREFIX + KEYS[0].hex()
        )  # whose answer the next look-up finds
        await cache._client.connection_pool.release(connection)
        for _ in range(4):
            assert set(await cache.find(KEYS[1:2])) <= {KEYS[1]}
        await until(lambda: sample(metrics, "mlcd_cache_up") == 1)
        assert set(await cache.find(KEYS[1:2])) == {KEYS[1]}


async def test_a_request_that_is_cancelled_leaves_no_answer_to_the_next(server):
    metrics = new_metrics()
    async with redis_cache(server, metrics, timeout_s=0.05) as cache:
        await written_by(cache, metrics)
        for number in range(60):
            asked = asyncio.ensure_future(cache.find(KEYS[:1]))
            await asyncio.sleep(0.00005 * number)
            asked.cancel()
            await asyncio.wait([asked])
            assert set(await cache.find(KEYS[1:])) <= set(KEYS[1:])
    assert counts(metrics)[2] == 0


def test_an_address_that_is_none_is_refused_without_repeating_it():
    server = RedisServer.__new__(RedisServer)
    server.url = "http://user:secret@host"
    with pytest.raises(ConfigInvalid, match="MLCD_REDIS_URL") as refused:
        redis_cache(server, new_metrics())
    assert "secret" not in str(refused.value) + str(refused.value.remedy)
