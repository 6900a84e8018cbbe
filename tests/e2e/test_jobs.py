"""Jobs done by real `mlcd worker` processes on real images, undisturbed and killed."""

import contextlib
import io
import json
import os
import random
import signal
import sqlite3
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.manifest import draft_path, open_artifact
from mlcd.collections.collection import Collection
from mlcd.images.sources import open_source
from mlcd.service.inference.engine.fake import FakeEncoder
from mlcd.service.jobs.job import JobSpec
from mlcd.service.jobs.service import open_queue
from mlcd.service.settings import read_settings
from tests.conftest import call_mlcd, start_mlcd, succeed
from tests.integration.running import children
from tests.unit.service.cached import redis_server

NUM_IMAGES, SHARD_IMAGES = 480, 8
BROKEN = "n00000007"
LAYOUTS = ("folder", "tar", "parquet")


class Setting:
    """One queue, and workers on it."""

    def __init__(self, folder, model, *, redis_url=None, lease_s=2, stall_s=300):
        self.folder, self.model = folder, str(model)
        self._settings = {
            "jobs__roots": folder,
            "jobs__shard_images": SHARD_IMAGES,
            "jobs__lease_s": lease_s,
        }
        self._settings["jobs__stall_s"] = stall_s
        if self.model.startswith("fake:"):
            self._settings["engine"] = "fake"
        if redis_url is not None:
            self._settings["redis_url"] = redis_url
        asked = {"model": "hog", "state_dir": str(folder / "state"), "redis_url": redis_url}
        self.queue = open_queue(read_settings(asked))
        self._processes = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._processes:
            process.kill()
            process.communicate(timeout=60)
        self.queue.close()

    def start(self, *more):
        given = {f"MLCD_{name.upper()}": str(value) for name, value in self._settings.items()}
        arguments = ("worker", "--model", self.model, "--state", self.folder / "state", *more)
        self._processes.append(start_mlcd(*arguments, env={**os.environ, **given}))
        return self._processes[-1]

    def work(self):
        """One undisturbed worker, until all is done."""
        process = self.start("--drain")
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        return output

    def submit(self, images, name, **changes):
        return self.queue.submit(self.spec(images, name, **changes))[0].id

    def spec(self, images, name, kind="label"):
        if self.model.startswith("fake:"):
            return JobSpec(
                "embed",
                str(images),
                str(self.folder / name),
                fingerprint=FakeEncoder(self.model).fingerprint,
            )
        model, centers = (
            open_artifact(path) for path in (Path(self.model), Path(self.model) / "centers")
        )
        assert model.fingerprint is not None
        return JobSpec(
            kind,
            str(images),
            str(self.folder / name),
            fingerprint=model.fingerprint,
            centers=centers.digest,
        )

    def parts(self, name):
        return len(list(draft_path(self.folder / name).glob("part-*.parquet")))

    def held(self, job_id):
        """(worker, stage, shard) of every lease."""
        leases = self.queue._database.read(job_id).leases.values()
        return [(lease.worker, lease.stage, lease.task) for lease in leases]


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


@pytest.fixture(scope="module")
def pictures(shared_data):
    """(name, JPEG) of real photographs, and one that is broken."""
    source = open_source(str(shared_data / "tiny_imagenet_pretrain" / "pretrain-0000.tar"))
    found = [
        (f"n{number:08d}", source.read(entry))
        for number, entry in enumerate(source.entries[:NUM_IMAGES])
    ]
    return [(name, data[:200] if name == BROKEN else data) for name, data in found]


def write_images(pictures, folder, layout):
    """The input's location."""
    if layout == "folder":
        for name, data in pictures:
            path = folder / "images" / f"{name}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return folder / "images"
    if layout == "tar":
        for number in range(3):
            with tarfile.open(folder / f"images-{number}.tar", "w") as tar:
                for name, data in pictures[number::3]:
                    member = tarfile.TarInfo(f"{name}.jpg")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        return folder / "images-*.tar"
    table = pa.table(
        {"key": [name for name, _ in pictures], "image": [data for _, data in pictures]}
    )
    pq.write_table(table, folder / "images.parquet", row_group_size=100)
    return folder / "images.parquet"


def assert_same(out, undisturbed):
    """Byte for byte, each key exactly once, the broken image in errors.jsonl and nowhere else."""
    ours, theirs = open_artifact(out), open_artifact(undisturbed)
    assert ours.digest == theirs.digest
    for name in theirs.files:
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes()
    keys = LabelTable.open(out).keys
    assert len(keys) == len(set(keys)) == NUM_IMAGES - 1
    errors = [json.loads(line) for line in (out / "errors.jsonl").read_text().splitlines()]
    assert [error["key"].rsplit("/")[-1].removesuffix(".jpg") for error in errors] == [BROKEN]
    assert not any(key.removesuffix(".jpg").endswith(BROKEN) for key in keys)
    assert not draft_path(out).exists()


def kill_and_finish(setting, images, num_kills, disturb=lambda kill: None):
    """SIGKILL to the worker after ever more parts, at a random moment; then nothing more."""
    setting.submit(images, "undisturbed")
    setting.work()
    job_id = setting.submit(images, "out")
    generator = random.Random(num_kills)
    for kill in range(1, num_kills + 1):
        process = setting.start()
        until(
            lambda kill=kill: (
                setting.parts("out") >= kill * NUM_IMAGES // SHARD_IMAGES // (num_kills + 2)
            )
        )
        disturb(kill)
        time.sleep(generator.uniform(0, 0.03))
        process.kill()
        process.communicate(timeout=60)
        assert setting.queue.get(job_id).state == "running"
    output = setting.work()
    job = setting.queue.get(job_id)
    assert (job.state, job.done, job.failed_items) == ("succeeded", NUM_IMAGES, 1), output
    assert_same(setting.folder / "out", setting.folder / "undisturbed")


@pytest.mark.parametrize(
    ("layout", "kills"),
    [("tar", 2), *(pytest.param(name, 10, marks=pytest.mark.slow) for name in LAYOUTS)],
)
def test_a_job_killed_ever_again_ends_with_the_same_bytes(
    journey, pictures, tmp_path, layout, kills
):
    with Setting(tmp_path, journey / "model") as setting:
        kill_and_finish(setting, write_images(pictures, tmp_path, layout), kills)
    succeed("verify", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(600)
def test_killed_ten_times_and_redis_twice_a_job_ends_with_the_same_bytes(
    journey, pictures, tmp_path
):
    with redis_server(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as redis:

        def disturb(kill):
            if kill in (4, 8):
                redis.stop()
                redis.start()

        with Setting(tmp_path, journey / "model", redis_url=redis.url) as setting:
            kill_and_finish(setting, write_images(pictures, tmp_path, "tar"), 10, disturb)


def slow(folder, latency_ms, **settings):
    """An engine that takes so long for each of four shards."""
    return Setting(folder, f"fake:latency_ms={latency_ms}", **settings)


@pytest.fixture
def few(digits, tmp_path):
    """Four shards of images, where jobs may read them."""
    folder = tmp_path / "few"
    folder.mkdir()
    for number, path in enumerate(sorted(digits.rglob("*.png"))[: 4 * SHARD_IMAGES]):
        (folder / f"{number}.png").write_bytes(path.read_bytes())
    return folder


def in_a_shard(setting, job_id):
    return until(lambda: any(stage == "shard" for _, stage, _ in setting.held(job_id)))


def test_a_worker_that_is_told_to_end_does_so_whatever_the_engine_does(few, tmp_path):
    with slow(tmp_path, 60_000) as setting:
        job_id = setting.submit(few, "out")
        process = setting.start()
        in_a_shard(setting, job_id)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
        assert (process.returncode, "Traceback" in output) == (0, False), output
        assert setting.held(job_id) == []
        again = setting.queue.claim("other", [setting.spec(few, "out").fingerprint], lease_s=60)
        assert (again.stage, again.attempt) == ("shard", 1)


def test_a_signal_to_every_process_and_its_echo_release_the_task_uncounted(few, tmp_path):
    """The worker is one process: its engine is a part of it."""
    with slow(tmp_path, 500) as setting:
        job_id = setting.submit(few, "out")
        process = setting.start()
        in_a_shard(setting, job_id)
        assert children(process.pid) == []
        for _ in range(2):
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=10)
        assert (process.returncode, "Traceback" in output) == (0, False), output
        assert setting.held(job_id) == []
        again = setting.queue.claim("other", [setting.spec(few, "out").fingerprint], lease_s=60)
        assert again.attempt == 1


def test_a_worker_that_is_told_to_end_does_so_whoever_holds_the_queue(few, tmp_path):
    with slow(tmp_path, 200) as setting:
        job_id = setting.submit(few, "out")
        process = setting.start()
        in_a_shard(setting, job_id)
        path = tmp_path / "state" / "jobs" / "queue.sqlite"
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            until(lambda: locked(other))
            time.sleep(2)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=10)
            assert (process.returncode, "Traceback" in output) == (0, False), output


def locked(database):
    with contextlib.suppress(sqlite3.OperationalError):
        database.execute("BEGIN IMMEDIATE")
        return True
    return False


def test_a_second_signal_ends_a_worker_at_once(few, tmp_path):
    with slow(tmp_path, 60_000) as setting:
        job_id = setting.submit(few, "out")
        process = setting.start()
        in_a_shard(setting, job_id)
        time.sleep(3)  # nothing shows that the engine has been asked
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=2)
        assert process.returncode == -signal.SIGINT


def test_a_cancel_is_heard_while_the_engine_hangs(few, tmp_path):
    """The worker begins anew, and takes away what the job has left."""
    with slow(tmp_path, 60_000) as setting:
        job_id = setting.submit(few, "out")
        process = setting.start()
        in_a_shard(setting, job_id)
        setting.queue.cancel(job_id)
        until(
            lambda: not any(stage == "shard" for _, stage, _ in setting.held(job_id)), timeout_s=5
        )
        until(lambda: not [path for path in tmp_path.iterdir() if "out" in path.name], timeout_s=30)
        assert process.poll() is None


def test_a_worker_whose_engine_hangs_ends_and_another_takes_its_shard(few, tmp_path):
    """Though its heartbeats go on, and long before its lease could end."""
    with slow(tmp_path, 3_600_000, lease_s=600, stall_s=1) as setting:
        job_id = setting.submit(few, "out")
        output, _ = setting.start().communicate(timeout=30)
        line = next(json.loads(line) for line in output.splitlines() if "hangs" in line)
        assert (line["level"], line["job"], line["attempt"]) == ("error", job_id, 1)
        assert line["message"].startswith("shard 0 hangs: no image was done for 1 s (")
        assert "mlcd.service.inference.engine.fake" in line["message"]
        assert (setting.held(job_id), setting.queue.get(job_id).state) == ([], "running")
        fingerprints = [setting.spec(few, "out").fingerprint]
        taken = None
        while taken is None or taken.shard != 0:
            taken = until(lambda: setting.queue.claim("other", fingerprints, lease_s=60))
        assert taken.attempt == 2


def freeze(process, queue):
    """Not while it writes to the queue: nobody else could."""
    with contextlib.closing(sqlite3.connect(queue, timeout=0, isolation_level=None)) as other:
        process.send_signal(signal.SIGSTOP)
        while not locked(other):
            process.send_signal(signal.SIGCONT)
            time.sleep(0.001)
            process.send_signal(signal.SIGSTOP)


def test_an_index_is_built_whoever_is_frozen_at_it(few, tmp_path):
    """And who wakes up when all is done leaves nothing."""
    out = tmp_path / "out"
    with slow(tmp_path, 1) as setting:
        job_id = setting.queue.submit(replace(setting.spec(few, "out"), kind="index"))[0].id
        frozen = setting.start()
        until(lambda: any(draft_path(out).glob("attempt-*")))
        freeze(frozen, tmp_path / "state" / "jobs" / "queue.sqlite")
        assert not out.exists()
        setting.work()
        assert setting.queue.get(job_id).state == "succeeded"
        frozen.send_signal(signal.SIGCONT)
        frozen.send_signal(signal.SIGTERM)
        output, _ = frozen.communicate(timeout=30)
        assert (frozen.returncode, "Traceback" in output) == (0, False), output
    with Collection.open(out, background=False) as collection:
        assert len(collection) == 4 * SHARD_IMAGES
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


def test_a_worker_without_roots_says_what_is_missing(journey, tmp_path):
    result = call_mlcd("worker", "--model", journey / "model", "--state", tmp_path)
    assert (result.returncode, "MLCD_JOBS__ROOTS" in result.stderr) == (2, True)
    assert len(result.stderr.splitlines()) == 1
