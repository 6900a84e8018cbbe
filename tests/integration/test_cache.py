"""The cache of a real server, with a real Redis that is stopped, frozen, filled and emptied under
load.
"""

import contextlib
import io
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from PIL import Image

from tests.integration.bodies import files
from tests.integration.running import serving, until
from tests.unit.service.cached import redis_server

RAW = {"Accept": "application/octet-stream"}


def png(number):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 250, number // 250, 7)).save(buffer, "PNG")
    return buffer.getvalue()


def embed(url, *images, client=httpx):
    answer = client.post(f"{url}/v1/images/embed", files=files(*images), headers=RAW, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer


def looked_up(server, tier, result="hit"):
    return server.metric(f'mlcd_cache_requests_total{{result="{result}",tier="{tier}"}}')


def stages(answer):
    parts = (stage.split(";dur=") for stage in answer.headers["server-timing"].split(", "))
    return {name: float(milliseconds) for name, milliseconds in parts}


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with redis_server(
        tmp_path_factory.mktemp("redis"), "--maxmemory-policy", "noeviction"
    ) as server:
        yield server


def test_an_image_that_comes_again_has_the_same_bytes_and_is_not_encoded(server, photo):
    first, again = embed(server, photo + b"once"), embed(server, photo + b"once")
    assert again.content == first.content
    assert stages(first)["inference"] > 0
    assert stages(again)["decode"] == stages(again)["inference"] == 0
    assert "x-mlcd-rounded" not in first.headers


def test_half_precision_is_asked_for_said_and_the_same_for_hits_and_misses(journey, server, photo):
    with serving(journey / "model", cache__dtype="float16") as rounding:
        first, again = embed(rounding.url, photo), embed(rounding.url, photo)
        assert first.headers["x-mlcd-rounded"] == again.headers["x-mlcd-rounded"] == "float16"
        assert again.content == first.content
        assert first.content != embed(server, photo).content
        assert looked_up(rounding, "memory") == 1


@pytest.mark.redis
def test_servers_share_what_is_the_same_and_nothing_else(redis, photo):
    found = []
    for variant in ({}, {"exif": "ignore"}, {"cache__dtype": "float16"}, {}):
        with serving("pixels", redis_url=redis.url, cache__memory_bytes=0, **variant) as server:
            vector = embed(server.url, photo).content
            found.append((looked_up(server, "redis"), vector))
            until(
                lambda server=server: (
                    server.metric('mlcd_cache_writes_total{result="written"}') or found[-1][0]
                ),
                5,
            )
    assert [hits for hits, _ in found] == [0, 0, 0, 1]
    assert found[-1][1] == found[0][1]


@pytest.mark.redis
def test_a_row_in_int8_is_found_by_int8_alone(redis, int8_model, photo):
    """One model of one fingerprint, in one Redis, in two precisions."""
    found, stated = [], []
    for precision in ("fp32", "int8", "int8"):
        options = {"redis_url": redis.url, "cache__memory_bytes": 0, "precision": precision}
        with serving(int8_model, **options) as server:
            vector = embed(server.url, photo).content
            found.append((looked_up(server, "redis"), vector))
            stated.append(httpx.get(f"{server.url}/v1/info").json())
            until(
                lambda server=server: (
                    server.metric('mlcd_cache_writes_total{result="written"}') or found[-1][0]
                ),
                5,
            )
    assert [hits for hits, _ in found] == [0, 0, 1]
    assert found[0][1] != found[1][1] == found[2][1]
    assert stated[0]["fingerprint"] == stated[1]["fingerprint"]
    assert stated[0]["precision"] == "fp32"
    assert stated[1]["precision"].startswith("int8-")


class Load:
    """Clients that send the same images over and over; every answer must be 200 and right."""

    def __init__(self, server, *, num_clients=4, num_images=30):
        self.images = [png(number) for number in range(num_images)]
        self.expected = [embed(server.url, image).content for image in self.images]
        self.wrong, self.slowest_s, self.num = [], 0.0, 0
        self._url, self._stopped = server.url, threading.Event()
        self._pool = ThreadPoolExecutor(num_clients)
        self._clients = [self._pool.submit(self._send, seed) for seed in range(num_clients)]

    def _send(self, seed):
        draw = random.Random(seed)
        with httpx.Client() as client:
            while not self._stopped.is_set():
                chosen = draw.sample(range(len(self.images)), draw.choice((1, 1, 1, 4)))
                started = time.monotonic()
                answer = embed(
                    self._url, *[self.images[number] for number in chosen], client=client
                )
                self.slowest_s = max(self.slowest_s, time.monotonic() - started)
                if answer.content != b"".join(self.expected[number] for number in chosen):
                    self.wrong.append(chosen)
                self.num += 1

    def stop(self):
        self._stopped.set()
        for client in self._clients:
            client.result(timeout=30)  # raises what an answer was, where it was none
        self._pool.shutdown()


@contextlib.contextmanager
def loaded(server):
    load = Load(server)
    try:
        yield load
    finally:
        load.stop()


def hits_grow(server):
    before = looked_up(server, "redis")
    until(lambda: looked_up(server, "redis") > before + 5, 15)


@pytest.mark.redis
def test_no_request_fails_or_stalls_whatever_becomes_of_redis_and_it_is_used_again(redis):
    settings = {"redis_url": redis.url, "cache__memory_bytes": 0}
    with serving("fake:latency_ms=5", engine="fake", **settings) as server, loaded(server) as load:
        hits_grow(server)

        redis.ask("FLUSHALL")
        hits_grow(server)

        redis.stop()
        until(lambda: server.metric("mlcd_cache_up") == 0, 60)
        served = load.num
        until(lambda: load.num > served + 20, 60)
        redis.start()
        until(lambda: server.metric("mlcd_cache_up") == 1, 60)
        hits_grow(server)

        redis.freeze()
        until(lambda: server.metric("mlcd_cache_up") == 0, 60)
        served = load.num
        until(lambda: load.num > served + 20, 60)
        redis.thaw()
        until(lambda: server.metric("mlcd_cache_up") == 1, 60)
        hits_grow(server)

        redis.ask("CONFIG", "SET", "maxmemory", "1")
        redis.ask("FLUSHALL")
        before = server.metric('mlcd_cache_writes_total{result="error"}')
        until(lambda: server.metric('mlcd_cache_writes_total{result="error"}') > before + 5, 60)
        redis.ask("CONFIG", "SET", "maxmemory", "0")
        hits_grow(server)

        load.stop()
        assert load.wrong == []
        assert load.slowest_s < 5  # a stall would be the deadline, 30 s
        encoded = server.metric("mlcd_batch_size_sum")
        looked = {
            result: looked_up(server, "redis", result)
            for result in ("hit", "miss", "damaged", "error")
        }
        assert looked["damaged"] == 0
        assert encoded <= looked["miss"] + looked["error"] + 20  # and the trials of probes


@pytest.mark.redis
def test_a_server_starts_and_serves_without_its_redis(redis, photo):
    redis.stop()
    try:
        with serving("fake:latency_ms=1", engine="fake", redis_url=redis.url) as server:
            assert embed(server.url, photo).status_code == 200
            assert server.metric("mlcd_cache_up") == 0
    finally:
        redis.start()
