"""An index job in this process, on a real queue, in the phase after its images."""

import threading
import time

import pytest

from mlcd.artifacts.manifest import draft_path
from mlcd.collections.collection import Collection
from tests.conftest import write_digits
from tests.unit.service.worker.working import spec, working

MODEL = "fake:latency_ms=1"
NUM_IMAGES = 40


@pytest.fixture(autouse=True)
def slowly_in_small_steps(monkeypatch):
    """Splits adding and indexing into steps, as with millions of images; events may come between
    them.
    """
    monkeypatch.setattr("mlcd.service.worker.loop.RENEWAL_S", 0.02)
    monkeypatch.setattr("mlcd.service.worker.loop.WORKER_IDLE_S", 0.02)
    monkeypatch.setattr("mlcd.pipelines.index._BLOCK_ROWS", 4)
    add = Collection.add
    monkeypatch.setattr(
        Collection, "add", lambda self, items: (time.sleep(0.1), add(self, items))[1]
    )


@pytest.fixture
def job(queue, tmp_path):
    images = write_digits(tmp_path / "images", NUM_IMAGES)
    return queue.submit(spec(images, tmp_path, MODEL, kind="index"))[0].id


def test_a_collection_is_told_while_it_grows(queue, job, tmp_path):
    seen = []

    def look():
        while (now := queue.get(job)).state in ("queued", "running"):
            seen.append((now.stage, now.collected, now.indexed))
            time.sleep(0.02)

    looking = threading.Thread(target=look)
    looking.start()
    with working(queue, tmp_path, model=MODEL, shard_images=16) as worker:
        worker.run(drain=True)
    looking.join()
    done = queue.get(job)
    assert (done.state, done.collected, done.indexed) == ("succeeded", NUM_IMAGES, NUM_IMAGES)
    assert len({collected for stage, collected, _ in seen if stage == "publish"}) > 3
    with Collection.open(tmp_path / "out", background=False) as collection:
        assert len(collection) == NUM_IMAGES


def test_a_cancel_while_a_collection_grows_leaves_none(queue, job, tmp_path):
    canceled_s = []

    def cancel():
        while not queue.get(job).collected:
            time.sleep(0.01)
        queue.cancel(job)
        canceled_s.append(time.monotonic())

    canceling = threading.Thread(target=cancel)
    canceling.start()
    with working(queue, tmp_path, model=MODEL, shard_images=16) as worker:
        while not canceled_s or queue.get(job).stage is not None:
            worker.run(drain=True)
    canceling.join()
    assert time.monotonic() - canceled_s[0] < 5
    assert not (tmp_path / "out").exists()
    assert not draft_path(tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == []
