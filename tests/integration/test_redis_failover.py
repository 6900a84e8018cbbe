"""Servers and workers on a Redis whose primary moves, while the old one lives on as its replica."""

import os
import time
from datetime import UTC, datetime

import httpx
import pytest

from service.keys.file import create_key
from tests.conftest import run_mlcd, start_mlcd, write_digits
from tests.integration.bodies import files
from tests.integration.running import serving, until
from tests.integration.test_cache import png
from tests.redis_pair import fail_over, redis_pair, service_name
from tests.unit.service.cached import cluster_node_options, redis_server

pytestmark = pytest.mark.redis


def test_a_failover_with_an_old_primary_that_lives_on_heals_without_a_restart(tmp_path):
    write_digits(tmp_path / "images", 3)
    _, token = create_key(
        tmp_path / "keys.json",
        "n",
        scopes=["jobs", "embed"],
        rate=10_000,
        now=datetime.now(UTC),
    )
    shared = {"jobs__roots": tmp_path, "jobs__lease_s": 6}
    with (
        redis_pair(tmp_path) as (primary, replica),
        service_name(primary) as name,
        serving(
            "pixels", **shared, redis_url=name.url, auth__keys_file=tmp_path / "keys.json"
        ) as server,
        httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {token}"}, timeout=30
        ) as client,
    ):
        environment = os.environ | {"MLCD_REDIS_URL": name.url}
        environment |= {f"MLCD_{key.upper()}": str(value) for key, value in shared.items()}
        worker = start_mlcd("worker", "--model", "pixels", env=environment)
        numbers = iter(range(1000))

        def run_job():
            output = tmp_path / f"out-{next(numbers)}"
            asked = {"kind": "embed", "input": str(tmp_path / "images"), "output": str(output)}
            answer = client.post("/v1/jobs", json=asked)
            assert answer.status_code == 202, answer.text
            until((output / "manifest.json").exists, 60)

        def written():
            answer = client.post("/v1/images/embed", files=files(png(next(numbers))))
            assert answer.status_code == 200, answer.text
            time.sleep(0.1)
            return server.metric('mlcd_cache_writes_total{result="written"}')

        def use_all(redis):
            until(lambda: server.metric("mlcd_job_workers") == 1, 60)
            run_job()
            before = written()
            until(lambda: written() > before, 60)
            assert server.metric("mlcd_cache_up") == 1
            redis.ask("DEL", *redis_keys(redis, "*rate*"))
            until(lambda: written() and redis_keys(redis, "*rate*"), 60)

        try:
            use_all(primary)
            fail_over(primary, replica)
            # The name leads to the old primary for a while.
            refused = client.post(
                "/v1/jobs",
                json={
                    "kind": "embed",
                    "input": str(tmp_path / "images"),
                    "output": str(tmp_path / "refused"),
                },
            )
            assert refused.status_code == 503
            assert "is a replica" in refused.json()["detail"], refused.text
            until(lambda: written() and server.metric("mlcd_cache_up") == 0, 60)

            name.target = replica
            started = time.monotonic()
            run_job()
            use_all(replica)
            assert time.monotonic() - started < 60
        finally:
            worker.terminate()
            said = worker.communicate(timeout=20)[0]
        assert "Traceback" not in said, said


def redis_keys(server, pattern):
    return [line.decode() for line in server.ask("KEYS", pattern).split(b"\r\n") if b"rate" in line]


@pytest.mark.parametrize(("command", "protocol"), [("serve", ""), ("worker", "?protocol=2")])
def test_a_node_of_a_redis_cluster_is_refused_at_the_start(tmp_path, command, protocol):
    (tmp_path / "redis").mkdir()
    with redis_server(tmp_path / "redis", *cluster_node_options()) as node:
        refused = run_mlcd(
            command,
            "--model",
            "pixels",
            env=os.environ
            | {"MLCD_REDIS_URL": node.url + protocol, "MLCD_JOBS__ROOTS": str(tmp_path)},
        )
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.count("\n") == 1, refused.stderr
    assert "node of a Redis Cluster, which is not supported" in refused.stderr
