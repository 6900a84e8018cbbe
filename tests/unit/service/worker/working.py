"""A worker in this process on a real queue, and jobs for it."""

import contextlib
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor

from mlcd.pipelines.shard import Equipment
from mlcd.service.inference.engine.fake import FakeEncoder
from mlcd.service.jobs.job import JobSpec
from mlcd.service.jobs.roots import Roots
from mlcd.service.worker.loop import Worker
from mlcd.service.worker.task import TaskRunner, Watch
from mlcd.service.worker.upload_results import UploadResults

MODEL = "fake:sick_s=0.05"
SLOW = "fake:latency_ms=100"


@contextlib.contextmanager
def working(store, tmp_path, model=MODEL, lease_s=30.0, shard_images=8, root=None):
    with ThreadPoolExecutor(1) as computing:
        equipment = Equipment(FakeEncoder(model), None, num_threads=2)
        runner = TaskRunner(
            equipment,
            Roots([str(root or tmp_path)]),
            UploadResults(None),
            shard_images=shard_images,
        )
        yield Worker(store, runner, computing, name="worker", lease_s=lease_s, stall_s=60.0)


def work(store, tmp_path, **options):
    with working(store, tmp_path, **options) as worker:
        worker.run(drain=True)


def spec(images, tmp_path, model=MODEL, **changes):
    given = {"kind": "embed", "input": str(images), "output": str(tmp_path / "out")}
    return JobSpec(**given | {"fingerprint": FakeEncoder(model).fingerprint} | changes)


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def planned_by_hand(queue, tmp_path, shard_images):
    """The task, and the shards that it was cut into by a worker with this setting."""
    task = queue.claim("by hand", [FakeEncoder(MODEL).fingerprint], lease_s=60)
    runner = TaskRunner(
        Equipment(FakeEncoder(MODEL), None, num_threads=2),
        Roots([str(tmp_path)]),
        UploadResults(None),
        shard_images=shard_images,
    )
    return task, runner.perform(task, Watch(until_s=time.monotonic() + 60)).sizes


def archived(folder, path):
    with tarfile.open(path, "w") as tar:
        for file in sorted(folder.glob("*.png")):
            tar.add(file, file.name)
