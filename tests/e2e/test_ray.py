"""Real Ray clusters on this machine: the bytes of one process, whatever is killed meanwhile."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict

import numpy as np
import pytest

from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.manifest import draft_path, open_artifact
from mlcd.encoders.hog import HogEncoder
from mlcd.pipelines.cluster import CHECKPOINT
from mlcd.pipelines.label import LabelOptions, label
from mlcd.pipelines.ray.session import RayOptions
from mlcd.pipelines.ray.shards import label_on_ray
from mlcd.progress import Reporter
from mlcd.types import unit_rows
from tests.conftest import free_port, run_mlcd, succeed, write_digits
from tests.integration.s3 import running_moto
from tests.written_artifacts import write_centers, write_embeddings

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

SILENT = Reporter("silent")
NUM_IMAGES, COPIES, PART_IMAGES = 1500, 3, 32
STORE_BYTES = 128 << 20
NODES = 4
ROWS, CENTERS = 40_000, 8000
SMALL = {"num_cpus": 1, "object_store_memory": STORE_BYTES}


@pytest.fixture(scope="module", autouse=True)
def quiet_ray():
    """Reports nothing to Ray's maker, and skips where Ray is not installed."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    pytest.importorskip("ray", reason="needs the extra ray")


@contextmanager
def cluster_of(num_nodes):
    """A cluster whose commands find it by RAY_ADDRESS."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        for _ in range(num_nodes):
            cluster.add_node(**SMALL)
        yield cluster
    finally:
        del os.environ["RAY_ADDRESS"]
        cluster.shutdown()


@pytest.fixture
def cluster():
    with cluster_of(NODES) as made:
        yield made


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Digits in tar shards, one of them cut off in the middle, and an image that is none."""
    folder = tmp_path_factory.mktemp("shards")
    digits = write_digits(folder / "digits", NUM_IMAGES)
    (digits / "3" / "0003.png").write_bytes(b"no image")
    files = sorted(digits.rglob("*.png"))
    (folder / "tars").mkdir()
    for number, first in enumerate(range(0, NUM_IMAGES, 250)):
        with tarfile.open(folder / "tars" / f"{number}.tar", "w") as tar:
            for path in files[first : first + 250]:
                for copy in range(COPIES):
                    tar.add(path, f"{copy}-{path.name}")
    poison = folder / "tars" / "2.tar"
    content = bytearray(poison.read_bytes())
    content[100 * 1024 : 101 * 1024] = bytes(range(1, 256, 2)) * 8  # no header of a file
    poison.write_bytes(content)
    shutil.rmtree(digits)
    return folder


@pytest.fixture(scope="module")
def options(shards):
    encoder, out = HogEncoder(), shards / "centers"
    vectors = np.abs(np.random.default_rng(0).standard_normal((50, encoder.dimension)))
    write_centers(out, vectors, encoder.fingerprint)
    images = str(shards / "tars" / "*.tar")
    return LabelOptions(images, str(out), model="hog", part_entries=PART_IMAGES)


@pytest.fixture(scope="module")
def alone(options, shards):
    """The labels that one process makes, and what they say of the damaged shard."""
    artifact = label(options, shards / "alone", reporter=SILENT)
    errors = [json.loads(line) for line in artifact.file("errors.jsonl").read_text().splitlines()]
    assert [error["key"] for error in errors] == [
        "2",
        *(f"1/{copy}-0003" for copy in range(COPIES)),
    ]
    return artifact


def check_same(out, alone):
    """Checks bytes and facts, and that nothing is left beside the artifact."""
    there = open_artifact(out)
    assert (there.digest, there.summary) == (alone.digest, alone.summary)
    if there.kind == "labels":
        keys = LabelTable.open(out).keys
        assert len(keys) == len(set(keys)) == there.summary["images"]
    for name in alone.files:
        assert there.file(name).read_bytes() == alone.file(name).read_bytes()
    assert not draft_path(out).exists()


DRIVER = """
import json, sys
from pathlib import Path
from mlcd.pipelines.ray.session import RayOptions
from mlcd.pipelines.cluster import CHECKPOINT
from mlcd.pipelines.label import LabelOptions
from mlcd.pipelines.ray.shards import label_on_ray
from mlcd.progress import Reporter
label_on_ray(
    LabelOptions.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), RayOptions(), Reporter("silent")
)
"""


def start_driver(options, out, before=""):
    command = [sys.executable, "-c", before + DRIVER, json.dumps(asdict(options)), str(out)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


# Each part takes so long that several nodes go meanwhile, on a fast machine too.
SLOW = """
import time
from mlcd.pipelines.ray import shards as on_ray
class Slow(on_ray.LabelRecipe):
    def open(self, num_threads):
        for shards in super().open(num_threads):
            make = shards.make
            def make_slowly(*given, **named):
                time.sleep(0.5)
                return make(*given, **named)
            shards.make = make_slowly
            yield shards
on_ray.LabelRecipe = Slow
"""


def parts_at(out):
    return len(list(draft_path(out).glob("part-*")))


def wait_for_parts(out, num, driver):
    end = time.monotonic() + 120
    while parts_at(out) < num:
        assert driver.poll() is None, driver.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_driver_killed_twice(cluster, options, alone, tmp_path):
    out = tmp_path / "labels"
    for killed in range(2):
        driver = start_driver(options, out)
        wait_for_parts(out, 10 + parts_at(out), driver)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        driver.stderr.close()
        assert killed or not out.exists()
    assert label_on_ray(options, out, RayOptions(), SILENT).digest == alone.digest
    check_same(out, alone)


def kill_nodes(cluster, driver):
    """Kills a node, and adds one, every 5 s until the driver has ended well; returns how many."""
    num_lost = 0
    while driver.poll() is None:
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        cluster.add_node(wait=False, **SMALL)
        num_lost += 1
        with suppress(subprocess.TimeoutExpired):
            driver.wait(5)
    assert driver.returncode == 0, driver.stderr.read()
    driver.stderr.close()
    return num_lost


def test_a_node_killed_every_5_seconds(cluster, options, alone, tmp_path):
    """The head has no CPU for workers: each node that goes takes a worker with it."""
    out = tmp_path / "labels"
    driver = start_driver(options, out, SLOW)
    wait_for_parts(out, 1, driver)
    assert kill_nodes(cluster, driver) >= 3
    check_same(out, alone)


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory):
    """Embeddings for clusters whose sums, 32 MB a block, do not all fit into a node's store."""
    out, generator = tmp_path_factory.mktemp("rows") / "embeddings", np.random.default_rng(0)
    rows = unit_rows(generator.standard_normal((ROWS, 512), np.float32))
    return write_embeddings(out, [rows])


def test_centers_by_stores_that_are_too_small_while_nodes_go(cluster, many_rows, tmp_path):
    given = (many_rows, "--clusters", CENTERS, "--iterations", 3, "--hold-out", 0)
    succeed("cluster", given[0], tmp_path / "alone", *given[1:], run=run_mlcd)
    out = tmp_path / "there"
    command = [sys.executable, "-m", "mlcd", "cluster", given[0], out, *given[1:], "--on", "ray"]
    driver = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not (draft_path(out) / CHECKPOINT).exists():
        assert driver.poll() is None, driver.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.1)
    assert kill_nodes(cluster, driver) >= 2
    check_same(out, open_artifact(tmp_path / "alone"))


@pytest.fixture(scope="module")
def embedded(shards):
    """Embeddings of the images, and centers in levels, made by one process."""
    given = ("embed", str(shards / "tars" / "*.tar"), shards / "embedded", "--model", "hog")
    succeed(*given, run=run_mlcd)
    given = ("cluster", shards / "embedded", shards / "clusters", "--levels", "40,8")
    succeed(*given, run=run_mlcd)
    return shards / "embedded", shards / "clusters"


def events_of(result):
    """The stages and their totals, and the last line, of `--json`."""
    assert result.returncode == 0, result.stderr
    *events, last = [json.loads(line) for line in result.stdout.splitlines()]
    return {(event["stage"], event["total"]) for event in events}, last, events[-1]["done"]


EMBEDDED = {
    "embed": ("embed", "{tars}", "{out}", "--model", "hog"),
    "label": ("label", "{embedded}", "{out}", "--centers", "{clusters}"),
    "label-in-blocks": ("label", "{embedded}", "{out}", "--centers", "{clusters}"),
    "cluster": ("cluster", "{embedded}", "{out}", "--clusters", "400", "--names"),
    "cluster-in-blocks": ("cluster", "{embedded}", "{out}", "--clusters", "400", "--names"),
}


def test_every_command_has_the_bytes_and_the_events_of_one_process(
    cluster, embedded, shards, tmp_path
):
    for name, command in EMBEDDED.items():
        places = {"tars": shards / "tars" / "*.tar", "embedded": embedded[0]}
        places["clusters"] = embedded[1]
        made = {}
        memory = ("--memory", 0.001) if "blocks" in name else ()
        for where, on in (("alone", ()), ("there", ("--on", "ray", *memory))):
            out = tmp_path / f"{name}-{where}"
            given = [part.format(**places, out=out) for part in command]
            made[where] = events_of(run_mlcd(*given, *on, "--json"))
            made[where][1].pop("finished")
        assert made["there"] == made["alone"], name
        check_same(tmp_path / f"{name}-there", open_artifact(tmp_path / f"{name}-alone"))


@pytest.mark.parametrize("arguments", [("--on", "ray://127.0.0.1:1"), ("--on", "ray:1")])
def test_a_wrong_address_is_one_line(options, arguments, tmp_path):
    given = ("--model", "hog", *arguments)
    result = run_mlcd("embed", options.source, tmp_path / "out", *given)
    assert result.returncode in (1, 2)
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "Traceback" not in result.stderr


def port_of_a_head():
    """A free port that is none of those of Ray's workers, 10002 to 19999."""
    return next(port for port in iter(free_port, None) if port >= 20_000)


def wait_for(port):
    end = time.monotonic() + 240
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < end, "the head does not listen"
        time.sleep(0.1)


@contextmanager
def started_by_hand(num_nodes, caches=None):
    """Yields the ports of GCS and of Ray's client, of nodes that `ray start` has begun. They ask for
    the token of the environment. caches: a folder in which each node has a cache of its own.
    """
    ports, ray = (
        (port_of_a_head(), port_of_a_head()),
        [sys.executable, "-m", "ray.scripts.scripts", "start"],
    )
    own = ["--block", "--disable-usage-stats", f"--object-store-memory={STORE_BYTES}"]
    head = ["--head", f"--port={ports[0]}", f"--ray-client-server-port={ports[1]}"]
    nodes = [["--num-cpus=0", "--include-dashboard=false", *head]]
    nodes += [["--num-cpus=1", f"--address=127.0.0.1:{ports[0]}"]] * num_nodes
    running = []
    try:
        for number, node in enumerate(nodes):
            cache = {} if caches is None else {"XDG_CACHE_HOME": str(caches / str(number))}
            command, environment = [*ray, *own, *node], {**os.environ, **cache}
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment))
            wait_for(ports[0])  # a node that asks before the head listens gives up
        yield ports
    finally:
        for process in running[::-1]:
            process.terminate()
        for process in running:
            process.wait()


@pytest.fixture
def token(monkeypatch):
    """Nodes ask for a token, and leave no trace where Ray looks for a cluster of this machine."""
    with tempfile.TemporaryDirectory() as short:  # a path of sockets has 107 characters at most
        monkeypatch.setenv("RAY_TMPDIR", short)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


def test_nodes_without_a_common_disk(shards, options, token, tmp_path, monkeypatch):
    """Images, centers and labels are in an object store, and each node has a cache of its own."""
    given = ("--model", "hog", "--centers", "s3://bucket/centers", "--json")
    with running_moto() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.filesystem().put(str(shards / "tars") + "/", "bucket/tars/", recursive=True)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "driver"))
        succeed("sync", options.centers, "s3://bucket/centers", run=run_mlcd)
        made = ("label", "s3://bucket/tars/*.tar")
        alone = succeed(*made, "s3://bucket/alone", *given, run=run_mlcd)
        with started_by_hand(2, tmp_path / "nodes") as (port, _):
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
            there = run_mlcd(*made, "s3://bucket/there", *given, "--on", "ray")
        assert there.returncode == 0, there.stderr
        of_alone, of_there = (json.loads(each.stdout.splitlines()[-1]) for each in (alone, there))
        assert of_there == of_alone | {"finished": "s3://bucket/there"}
        succeed("verify", "s3://bucket/there", run=run_mlcd)
    assert list((tmp_path / "nodes").iterdir()), "the nodes used the cache of the driver"


def test_nodes_of_ray_start(shared_data, token, tmp_path):
    """Real photographs, by the address in the environment and by Ray's client."""
    images = shared_data / "caltech101_20"
    given = ("--model", "hog")
    succeed("embed", images, tmp_path / "alone", *given, run=run_mlcd)
    alone = open_artifact(tmp_path / "alone")
    with started_by_hand(NODES) as (port, client):
        environment = {**os.environ, "RAY_ADDRESS": f"127.0.0.1:{port}"}
        succeed("embed --on ray", images, tmp_path / "a", *given, env=environment, run=run_mlcd)
        check_same(tmp_path / "a", alone)
        wait_for(client)
        on = ("--on", f"ray://127.0.0.1:{client}", "--workers", 2)
        succeed("embed", images, tmp_path / "b", *given, *on, run=run_mlcd)
        check_same(tmp_path / "b", alone)
