"""Workers of one job on two machines that have nothing in common but an object store and Redis:
network namespaces with a wire to the store each, none between them, and a disk of their own.
"""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager

import pytest

from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.manifest import MANIFEST, open_artifact
from mlcd.pipelines.sync import sync
from mlcd.progress import Reporter
from mlcd.service.jobs.job import JobSpec
from mlcd.service.jobs.service import open_queue
from mlcd.service.settings import read_settings
from tests.conftest import succeed
from tests.e2e.test_jobs import until
from tests.e2e.test_two_machines import ip, namespace
from tests.integration.s3 import SECRET, running_moto, using
from tests.unit.service.cached import redis_server

STORE = "10.215.0.1"
ROOT = "s3://bucket/jobs"
NAMES = ("first", "second")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.redis,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and the command ip",
    ),
]


@contextmanager
def machine(number):
    """The name of a namespace that reaches STORE, which is here, and nothing else."""
    name, here, there = (f"{word}{os.getpid()}-{number}" for word in ("mlcd-apart-", "h", "t"))
    with namespace(name):
        ip("link", "add", here, "type", "veth", "peer", "name", there)
        ip("link", "set", there, "netns", name)
        ip("address", "add", f"10.215.{number}.1/30", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", name, "address", "add", f"10.215.{number}.2/30", "dev", there)
        ip("-n", name, "link", "set", there, "up")
        ip("-n", name, "link", "set", "lo", "up")
        if number:
            ip("-n", name, "route", "add", STORE, "via", f"10.215.{number}.1")
        yield name


@pytest.fixture
def machines():
    with ExitStack() as stack:
        yield [stack.enter_context(machine(number)) for number in range(2)]


@pytest.fixture
def store(machines, tmp_path):
    with running_moto(STORE) as store, using(store, tmp_path):
        yield store


@pytest.fixture
def queue(machines, tmp_path):
    listening = ("--bind", "127.0.0.1", STORE, "--protected-mode", "no")
    with redis_server(tmp_path, *listening) as redis:
        url = redis.url.replace("127.0.0.1", STORE)
        asked = {"model": "hog", "redis_url": url}
        with closing(open_queue(read_settings(asked))) as opened:
            opened.url = url
            yield opened


def start_on(machine, name, model, queue, disk):
    """Starts a worker that writes on a disk that no other machine sees, and nowhere else."""
    given = {
        "MLCD_REDIS_URL": queue.url,
        "MLCD_JOBS__ROOTS": ROOT,
        "MLCD_JOBS__SHARD_IMAGES": "8",
        "MLCD_JOBS__LEASE_S": "2",
        "XDG_CACHE_HOME": str(disk),
    }
    with_a_disk = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(disk)]
    worker = [sys.executable, "-m", "mlcd", "worker", "--model", str(model), "--name", name]
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, *with_a_disk, *worker],
        env=os.environ | given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def holders(queue, job_id):
    leases = queue._database.read(job_id).leases.values()
    return {lease.worker for lease in leases if lease.stage == "shard"}


def check_labels(job, files, expected, folder):
    """Each key once, and the labels of one machine alone."""
    assert (job.state, job.done, job.failed_items) == ("succeeded", 200, 0), job.problem
    sync(job.spec.output, folder, Reporter("silent"))
    made = LabelTable.open(folder)
    assert list(made.keys) == list(expected.keys)
    assert len(set(made.keys)) == 200
    assert (made.ids == expected.ids).all()
    assert not [name for name in files.find(job.spec.output) if "/." in name]


def test_workers_without_a_common_folder_share_a_job_and_one_is_lost(
    machines, store, queue, journey, digits, tmp_path
):
    model, centers = journey / "model", journey / "model" / "centers"
    disk, files = tmp_path / "disk", store.filesystem()
    disk.mkdir()
    files.put(str(digits), "bucket/jobs/images", recursive=True)
    succeed("label", digits, tmp_path / "alone", "--model", model, "--centers", centers)
    expected = LabelTable.open(tmp_path / "alone")
    artifacts = [open_artifact(path) for path in (model, centers)]

    def submit(name):
        spec = JobSpec(
            "label",
            f"{ROOT}/images",
            f"{ROOT}/{name}",
            fingerprint=artifacts[0].fingerprint,
            centers=artifacts[1].digest,
        )
        return queue.submit(spec)[0].id

    workers = [
        start_on(machine, name, model, queue, disk)
        for machine, name in zip(machines, NAMES, strict=True)
    ]
    try:
        until(lambda: queue.workers() == list(NAMES))
        job_id = submit("shared")
        until(lambda: holders(queue, job_id) == set(NAMES))
        until(lambda: queue.get(job_id).state == "succeeded")
        check_labels(queue.get(job_id), files, expected, tmp_path / "shared")
        job_id = submit("lost")
        until(lambda: "second" in holders(queue, job_id))
        workers[1].kill()
        assert not files.exists(f"bucket/jobs/lost/{MANIFEST}")
        until(lambda: queue.get(job_id).state == "succeeded")
        check_labels(queue.get(job_id), files, expected, tmp_path / "lost")
    finally:
        for worker in workers:
            worker.kill()
        told = "".join(worker.communicate(timeout=60)[0] for worker in workers)
    assert list(disk.iterdir()) == []
    assert SECRET not in told
