"""docker-compose.yml from outside: asked, restarted, its processes killed, taken down."""

import json
import shutil
import time

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from tests.docker.engine import Stack, docker

NAME = "mlcd-test"


@pytest.fixture(scope="module")
def data_dir(digits, journey, tmp_path_factory):
    """A folder of this machine that jobs may use: images and embeddings to read, and a place to
    write to.
    """
    folder = tmp_path_factory.mktemp("data")
    shutil.copytree(digits, folder / "images")
    shutil.copytree(journey / "embeddings", folder / "embeddings")
    (folder / "made").mkdir()
    for path in (folder.parent, folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (folder / "made").chmod(0o777)
    return folder


@pytest.fixture(scope="module")
def stack(image, model_dir, data_dir):
    image("api")
    with Stack(NAME, MODEL=model_dir / "model", DATA_DIR=data_dir) as stack:
        collection = "/var/lib/mlcd/collections/demo"
        stack("run", "--rm", "-T", "--no-deps", "api", "index", "/data/embeddings", collection)
        stack("up", "--detach", "--build")
        stack.wait_ready()
        yield stack


def embed(stack, content):
    answer = httpx.post(f"{stack.url}/v1/images/embed", files={"files": content}, timeout=30)
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["results"][0]["embedding"], np.float32)


def cached(stack, result):
    """Images that Redis was asked for with this result, since the server started."""
    lines = httpx.get(f"{stack.url}/metrics", timeout=10).text.splitlines()
    return next(
        float(line.split()[-1])
        for line in lines
        if f'requests_total{{result="{result}",tier="redis"}}' in line
    )


def remembered(stack, content):
    """Embed it and wait until Redis has it: written behind the answer, on disk a second later at
    most.
    """
    vector = embed(stack, content)
    deadline = time.monotonic() + 10
    while stack.execute("redis", "redis-cli", "dbsize").strip() == "0":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(2)
    return vector


def test_it_embeds_labels_and_searches(stack, photo, digits):
    vector = embed(stack, photo)
    assert vector @ vector == pytest.approx(1, abs=1e-5)
    labels = httpx.post(f"{stack.url}/v1/labels?top=3", files={"files": photo}, timeout=30).json()
    assert len(labels["results"][0]["labels"]) == 3
    digit = min(digits.rglob("*.png"))
    found = httpx.post(
        f"{stack.url}/v1/collections/demo/search?top=1",
        files={"files": digit.read_bytes()},
        timeout=30,
    ).json()
    assert found["results"][0]["matches"][0]["id"] == str(digit.relative_to(digits))


def test_only_this_machine_reaches_it_and_redis_is_reached_by_nobody(stack):
    assert docker("port", stack.container("api")).stdout.split()[-1].startswith("127.0.0.1:")
    assert docker("port", stack.container("redis")).stdout == ""


@pytest.mark.parametrize("service", ["api", "redis"])
def test_a_container_is_given_nothing_that_it_does_not_need(stack, service):
    status = stack.execute(
        service, "sh", "-c", "cat /proc/self/status; touch /etc/here 2>&1", check=False
    )
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert fields["Uid"].split()[0] != "0"
    assert "Read-only file system" in status


def test_a_restart_keeps_what_redis_holds(stack, photo):
    vector = remembered(stack, photo)
    stack("restart")
    stack.wait_ready()
    stack.wait_healthy("redis")
    assert np.array_equal(embed(stack, photo), vector)
    assert cached(stack, "hit") == 1


def test_a_killed_server_comes_back(stack, photo):
    vector = remembered(stack, photo)
    path = f"{stack.url}/v1/collections/kept"
    assert httpx.put(path, timeout=10).status_code in (200, 201)
    form = {
        "files": {"files": photo},
        "data": {"items": '[{"id": "photo", "metadata": {"year": 2024}}]'},
    }
    assert httpx.post(f"{path}/items", **form, timeout=30).json()["errors"] == []
    stack.kill("api", "/opt/mlcd/bin/python /opt/mlcd/bin/mlcd")
    stack.wait_ready()
    assert np.array_equal(embed(stack, photo), vector)
    assert httpx.get(f"{path}/items/photo", timeout=10).json()["metadata"] == {"year": 2024}
    stack.wait_healthy("api")


def test_a_job_is_done_though_its_worker_is_killed(stack, data_dir, digits):
    asked = {"kind": "label", "input": "/data/images", "output": "/data/made/labels", "top": 3}
    answer = httpx.post(f"{stack.url}/v1/jobs", json=asked, timeout=30)
    assert answer.status_code == 202, answer.text
    stack.kill("worker", "/opt/mlcd/bin/python /opt/mlcd/bin/mlcd")
    deadline = time.monotonic() + 120
    while (job := httpx.get(f"{stack.url}{answer.headers['location']}", timeout=10).json())[
        "state"
    ] != "succeeded":
        assert job["state"] in ("queued", "running"), job
        assert time.monotonic() < deadline, job
        time.sleep(0.5)
    keys = pq.read_table(data_dir / "made" / "labels" / "part-00000.parquet")["key"].to_pylist()
    assert sorted(keys) == sorted(str(path.relative_to(digits)) for path in digits.rglob("*.png"))


def test_a_killed_redis_costs_no_request_and_comes_back_with_what_it_held(stack, photo, digits):
    vector = remembered(stack, photo)
    before = stack.execute("redis", "redis-cli", "dbsize")
    stack.kill("redis", "redis-server")
    embed(stack, max(digits.rglob("*.png")).read_bytes())
    stack.wait_healthy("redis")
    assert int(stack.execute("redis", "redis-cli", "dbsize")) >= int(before)
    assert np.array_equal(embed(stack, photo), vector)


def test_stopped_it_ends_by_itself_and_in_time(stack):
    stack("stop", "api")
    assert stack.inspect("api")["State"]["ExitCode"] == 0
    stack("start", "api")
    stack.wait_ready()


def test_down_leaves_nothing(image, model_dir):
    with Stack(f"{NAME}-down", MODEL=model_dir / "model") as stack:
        stack("up", "--detach")
        stack.wait_ready()
    for kind in ("container", "volume", "network"):
        found = docker(
            kind, "ls", "--quiet", "--filter", f"label=com.docker.compose.project={NAME}-down"
        )
        assert found.stdout == ""


def test_production_asks_for_keys_and_redis_for_a_password(image, model_dir, photo, tmp_path):
    secrets = tmp_path / "secrets"
    secrets.mkdir(mode=0o700)
    (secrets / "settings").write_text("MLCD_REDIS_URL=redis://:a-password@redis:6379/0\n")
    (secrets / "redis.conf").write_text("requirepass a-password\n")
    image("api")
    with Stack(
        f"{NAME}-keys",
        "deploy/compose/production.yml",
        MODEL=model_dir / "model",
        SECRETS_DIR=secrets,
    ) as stack:
        made = stack("run", "--rm", "-T", "--no-deps", "api", "keys", "create", "shop")
        key = made.stdout.strip().splitlines()[-1]
        stack("up", "--detach")
        stack.wait_ready()
        assert (
            httpx.post(
                f"{stack.url}/v1/images/embed", files={"files": photo}, timeout=30
            ).status_code
            == 401
        )
        answer = httpx.post(
            f"{stack.url}/v1/images/embed",
            files={"files": photo},
            headers={"X-API-Key": key},
            timeout=30,
        )
        assert answer.status_code == 200
        assert "NOAUTH" in stack.execute("redis", "redis-cli", "get", "anything")
        assert "a-password" not in json.dumps(stack.inspect("api")["Config"])
        assert cached(stack, "miss") == 1


# What the real server answers, beside what the embedded engine makes of the same pixels.
COMPARES = """
import sys
import numpy as np
import tritonclient.grpc as grpc
from mlcd.encoders import open_encoder
from mlcd.encoders.options import EncoderOptions
encoder = open_encoder("/srv/mlcd/model", EncoderOptions(engine="openvino"))
crop = encoder.preprocess.crop
pixels = np.random.default_rng(0).integers(0, 256, (4, 3, crop, crop), dtype=np.uint8)
given = grpc.InferInput("image_u8", list(pixels.shape), "UINT8")
given.set_data_from_numpy(pixels)
name = sys.argv[1]
client = grpc.InferenceServerClient("triton:8001")
rows = client.infer(name, [given], client_timeout=10).as_numpy("embedding")
print((rows * encoder.encode(pixels)).sum(axis=1).min())
"""


def test_triton_in_its_container_agrees_and_comes_back_when_killed(image, model_dir):
    image("api")
    image("triton-cpu")
    repository = model_dir / "triton-cpu"
    (model,) = repository.iterdir()
    environment = {"MODEL": model_dir / "model", "TRITON_REPOSITORY": repository}
    with Stack(f"{NAME}-triton", profiles=("triton-cpu",), **environment) as stack:
        stack("up", "--detach", "--build")
        for service in ("api", "triton-cpu"):
            stack.wait_healthy(service)
        assert docker("port", stack.container("triton-cpu")).stdout == ""
        compare = ("api", "python", "-", model.name)
        assert float(stack.execute(*compare, input=COMPARES)) > 0.9999
        stack.kill(
            "triton-cpu",
            "/opt/triton/lib/python3.11/site-packages/pytriton/tritonserver/bin/tritonserver",
        )
        stack.wait_healthy("triton-cpu")
        assert float(stack.execute(*compare, input=COMPARES)) > 0.9999


def test_the_server_asks_triton_and_both_come_back_when_triton_is_killed(
    stack, image, model_dir, photo, digits
):
    image("triton-cpu")
    environment = {"MODEL": model_dir / "model", "TRITON_REPOSITORY": model_dir / "triton-cpu"}
    with Stack(
        f"{NAME}-asks", "deploy/compose/triton.yml", profiles=("triton-cpu",), **environment
    ) as asks:
        asks("up", "--detach", "--build")
        asks.wait_ready()
        assert httpx.get(f"{asks.url}/v1/info", timeout=10).json()["engine"] == "triton"
        assert embed(asks, photo) @ embed(stack, photo) > 0.9999
        labels = httpx.post(
            f"{asks.url}/v1/labels?top=3", files={"files": photo}, timeout=30
        ).json()
        assert len(labels["results"][0]["labels"]) == 3
        asks.kill(
            "triton-cpu",
            "/opt/triton/lib/python3.11/site-packages/pytriton/tritonserver/bin/tritonserver",
        )
        asks.wait_healthy("triton-cpu")
        asks.wait_ready()
        digit = min(digits.rglob("*.png")).read_bytes()
        assert embed(asks, digit) @ embed(stack, digit) > 0.9999


def test_the_default_needs_neither_gpu_nor_triton_and_every_profile_is_a_configuration(
    engine, model_dir
):
    stack = Stack(
        f"{NAME}-config", profiles=("triton-cpu", "gpu", "postgres"), MODEL=model_dir / "model"
    )
    services = yaml.safe_load(stack("config").stdout)["services"]
    profiles = {name: service.get("profiles") for name, service in services.items()}
    assert profiles == {
        "api": None,
        "worker": None,
        "redis": None,
        "postgres": ["postgres"],
        "triton-cpu": ["triton-cpu"],
        "triton-gpu": ["gpu"],
    }
    assert all(
        service["read_only"] and service["cap_drop"] == ["ALL"] for service in services.values()
    )
    assert [name for name, service in services.items() if "ports" in service] == ["api"]
