"""The queue and the cache on a Redis that is not a primary, or is one no more."""

import asyncio
import contextlib
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlcd.errors import ConfigInvalid, Unavailable
from mlcd.service.jobs.service import open_queue
from mlcd.service.keys import rates
from mlcd.service.keys.rates import open_rate_limiter
from mlcd.service.redis_clients import refuse_unsupported_redis
from mlcd.service.settings import read_settings
from tests.conftest import run_mlcd
from tests.contract.job_stores import MODEL, submitted
from tests.integration.running import until as wait_until
from tests.redis_pair import fail_over, redis_pair, service_name
from tests.unit.service.cached import cluster_node_options, redis_cache, redis_server
from tests.unit.service.engines import new_metrics, run, sample, until
from tests.unit.service.inference.cache.test_redis import KEYS, PACKED, written, written_by
from tests.unit.service.keys.test_rates import key

pytestmark = pytest.mark.redis


@pytest.fixture
def pair(tmp_path):
    with redis_pair(tmp_path) as servers:
        yield servers


def opened(url):
    return contextlib.closing(open_queue(read_settings({"model": "hog", "redis_url": url})))


def test_a_name_that_moves_with_the_failover_costs_no_job(pair):
    primary, replica = pair
    with service_name(primary) as name, opened(name.url) as queue:
        for number in range(4):
            submitted(queue, number)
            queue.heartbeat("w", MODEL, lease_s=60)
            fail_over(primary, replica)
            primary, replica = replica, primary
            name.target = primary
        assert sum(queue.stats().jobs.values()) == 4
        assert queue.workers() == ["w"]


def test_a_job_waits_for_a_failover_that_takes_a_moment(pair):
    primary, replica = pair
    with service_name(primary) as name, opened(name.url) as queue, ThreadPoolExecutor(1) as pool:
        submitted(queue)
        fail_over(primary, replica)
        job = pool.submit(submitted, queue, 1)
        time.sleep(0.3)
        name.target = replica
        assert queue.get(job.result())


def test_a_name_that_stays_with_a_replica_is_said_and_the_remedy(pair):
    with opened(pair[1].url) as queue:
        started = time.monotonic()
        with pytest.raises(Unavailable, match="the job queue's Redis is a replica") as refused:
            submitted(queue)
        assert "MLCD_REDIS_URL must lead to the primary" in str(refused.value.remedy)
        assert 0.5 < time.monotonic() - started < 3


def test_all_connections_are_made_anew_when_one_is_refused(pair):
    """Else those that only read would stay with a server that may be left behind."""
    primary, replica = pair
    with service_name(primary) as name, opened(name.url) as queue, ThreadPoolExecutor(4) as pool:
        submitted(queue)
        list(pool.map(lambda _: queue.stats(), range(40)))
        fail_over(primary, replica)
        name.target = replica
        submitted(queue, 1)
        replica.ask("REPLICAOF", "NO", "ONE")
        primary.ask("REPLICAOF", "NO", "ONE")
        primary.ask("FLUSHALL")
        counts = pool.map(lambda _: sum(queue.stats().jobs.values()), range(40))
        assert set(counts) == {2}


def test_a_cache_moves_with_the_primary_and_says_so_meanwhile(pair, caplog):
    primary, replica = pair

    async def scenario(name):
        metrics = new_metrics()
        async with redis_cache(name, metrics) as cache:
            await written_by(cache, metrics)
            await asyncio.to_thread(fail_over, primary, replica)
            cache.put(KEYS[0], PACKED)
            await until(lambda: sample(metrics, "mlcd_cache_up") == 0)
            for _ in range(20):  # look-ups, which a replica answers, do not hide it
                await cache.find(KEYS)
                await asyncio.sleep(0.05)
            assert sample(metrics, "mlcd_cache_up") == 0
            assert written(metrics, "error") == 1
            name.target = replica
            await until(lambda: sample(metrics, "mlcd_cache_up") == 1)
            await written_by(cache, metrics)
            assert len(await cache.find(KEYS)) == len(KEYS)

    with caplog.at_level(logging.WARNING, "mlcd.service"), service_name(primary) as name:
        run(scenario(name))
    assert "is a replica, which takes no writes" in caplog.text
    assert caplog.text.count("is used again") == 1


async def test_a_cache_that_begins_on_a_replica_is_used_once_that_is_the_primary(pair):
    primary, replica = pair
    metrics = new_metrics()
    async with redis_cache(replica, metrics) as cache:
        assert sample(metrics, "mlcd_cache_up") == 0
        await asyncio.to_thread(fail_over, primary, replica)
        await until(lambda: sample(metrics, "mlcd_cache_up") == 1)
        await written_by(cache, metrics)


async def test_a_redis_without_the_replicas_that_it_requires_takes_no_vectors(pair):
    primary, _ = pair
    metrics = new_metrics()
    async with redis_cache(primary, metrics) as cache:
        await written_by(cache, metrics)
        primary.ask("CONFIG", "SET", "min-replicas-to-write", "2")
        cache.put(KEYS[0], PACKED)
        await until(lambda: sample(metrics, "mlcd_cache_up") == 0)
        await asyncio.sleep(1)
        assert sample(metrics, "mlcd_cache_up") == 0
        primary.ask("CONFIG", "SET", "min-replicas-to-write", "1")
        await until(lambda: sample(metrics, "mlcd_cache_up") == 1)


def test_a_redis_that_loads_its_data_is_used_once_it_has_done_so(tmp_path):
    slowly = ("--rdbcompression", "no", "--loading-process-events-interval-bytes", "1024")
    slowly += ("--key-load-delay", "30000")
    with (
        redis_server(tmp_path, *slowly) as redis,
        opened(redis.url) as queue,
        ThreadPoolExecutor(1) as starting,
    ):
        submitted(queue)
        for number in range(120):
            redis.ask("SETRANGE", f"key{number}", "2000", "x")
        redis.ask("SAVE")
        redis.stop()
        started = starting.submit(redis.start)
        wait_until(lambda: b"LOADING" in redis.ask("GET", "x"), 10)
        with pytest.raises(Unavailable, match="is loading its data"):
            queue.stats()
        started.result()
        assert sum(queue.stats().jobs.values()) == 1


@pytest.mark.parametrize("protocol", ["", "?protocol=2"])
def test_a_node_of_a_redis_cluster_is_refused_and_takes_no_job(tmp_path, protocol):
    with redis_server(tmp_path, *cluster_node_options()) as node:
        with pytest.raises(ConfigInvalid, match="is a node of a Redis Cluster"):
            refuse_unsupported_redis(node.url + protocol)
        with (
            opened(node.url + protocol) as queue,
            pytest.raises(Unavailable, match="is a node of a Redis Cluster"),
        ):
            submitted(queue)


@pytest.mark.parametrize(("command", "protocol"), [("serve", ""), ("worker", "?protocol=2")])
def test_a_node_of_a_redis_cluster_is_refused_at_the_start(tmp_path, command, protocol):
    with redis_server(tmp_path, *cluster_node_options()) as node:
        given = {"MLCD_REDIS_URL": node.url + protocol, "MLCD_JOBS__ROOTS": str(tmp_path)}
        refused = run_mlcd(command, "--model", "pixels", env=os.environ | given)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "node of a Redis Cluster, which is not supported" in refused.stderr


async def test_rates_move_with_the_primary(pair, monkeypatch):
    monkeypatch.setattr(rates, "RATE_REDIS_REST_S", 0.3)
    primary, replica = pair
    with service_name(primary) as name:
        async with open_rate_limiter(name.url, metrics=new_metrics()) as limiter:
            await limiter.take(key(), 1)
            await asyncio.to_thread(fail_over, primary, replica)
            name.target = replica
            replica.ask("FLUSHALL")
            await limiter.take(key(), 1)  # which this server counts alone
            assert replica.num_keys() == 0
            await asyncio.sleep(0.4)
            await limiter.take(key(), 1)
            assert replica.num_keys() > 0


def test_a_redis_that_is_not_there_yet_is_not_refused(tmp_path):
    with redis_server(tmp_path) as server:
        refuse_unsupported_redis(server.url)
    refuse_unsupported_redis(server.url)
