"""The cache of a real server, with a real Redis that is stopped, frozen, filled and emptied under
load.
"""

import httpx
import pytest

from tests.integration.bodies import files
from tests.integration.running import serving, until
from tests.unit.service.cached import redis_server

RAW = {"Accept": "application/octet-stream"}


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
def test_a_server_starts_and_serves_without_its_redis(redis, photo):
    redis.stop()
    try:
        with serving("fake:latency_ms=1", engine="fake", redis_url=redis.url) as server:
            assert embed(server.url, photo).status_code == 200
            assert server.metric("mlcd_cache_up") == 0
    finally:
        redis.start()
