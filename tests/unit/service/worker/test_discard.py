"""The leftovers of a canceled job, in this process on a real queue: visible until they are gone."""

import contextlib
import fcntl
import os
import threading
import time

import pytest

from mlcd.artifacts.manifest import draft_path
from mlcd.errors import Conflict
from mlcd.pipelines.shard import Equipment
from mlcd.service.inference.engine.fake import FakeEncoder
from mlcd.service.jobs.roots import Roots
from mlcd.service.worker.failures import problem_of
from mlcd.service.worker.task import TaskRunner, Watch
from mlcd.service.worker.upload_results import UploadResults
from tests.conftest import write_digits
from tests.unit.service.worker.working import MODEL, planned_by_hand, spec, work, working


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    for name in ("AFTER_FAILURE_S", "WORKER_IDLE_S"):
        monkeypatch.setattr(f"mlcd.service.worker.loop.{name}", 0.02)
    monkeypatch.setattr("mlcd.service.jobs.transitions.FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr("mlcd.service.jobs.transitions.LONGEST_PAUSE_S", 0.1)


@pytest.fixture
def job(queue, tmp_path):
    """One that was begun and canceled."""
    job_id = queue.submit(spec(write_digits(tmp_path / "images", 10), tmp_path))[0].id
    queue.finish_plan(*planned_by_hand(queue, tmp_path, shard_images=8))
    queue.cancel(job_id)
    return job_id


@contextlib.contextmanager
def somebody_in(path):
    """Locks the path, as an `mlcd embed` that goes on with it does."""
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


@pytest.mark.timeout(60)
def test_it_is_told_why_it_stays_and_it_goes_when_it_can(queue, job, tmp_path, caplog):
    seen = []

    def leave_after_many_failures(worker):
        with somebody_in(draft_path(tmp_path / "out")):
            while len(caplog.records) < 5:
                time.sleep(0.01)
            seen.append(queue.get(job))
        while queue.get(job).stage is not None:
            time.sleep(0.01)
        worker._handle_signal(0, None)

    with working(queue, tmp_path) as worker:
        leaving = threading.Thread(target=leave_after_many_failures, args=(worker,))
        leaving.start()
        worker.run(drain=False)
        worker.exit_timer.cancel()
        leaving.join()
    expected = ("canceled", "discard", "conflict")
    assert (seen[0].state, seen[0].stage, seen[0].problem.code) == expected
    assert f"another process is writing {draft_path(tmp_path / 'out')}" in seen[0].problem.message
    assert "discard failed: another process is writing" in caplog.records[0].message
    assert not draft_path(tmp_path / "out").exists()
    assert queue.get(job).problem is None


@pytest.mark.timeout(60)
def test_who_drains_leaves_what_cannot_be_cleared_away(queue, job, tmp_path, caplog):
    with somebody_in(draft_path(tmp_path / "out")), working(queue, tmp_path) as worker:
        worker.run(drain=True)
    assert len(caplog.records) == 3
    assert queue.get(job).stage == "discard"
    assert draft_path(tmp_path / "out").is_dir()
    work(queue, tmp_path)
    assert not draft_path(tmp_path / "out").exists()


def test_the_code_says_what_stays(queue, job, tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "refused", path)

    monkeypatch.setattr("mlcd.pipelines.ownership.lock_directory", refuse)
    equipment = Equipment(FakeEncoder(MODEL), None, num_threads=2)
    runner = TaskRunner(equipment, Roots([str(tmp_path)]), UploadResults(None), shard_images=8)
    task = queue.claim("w", [runner.fingerprint], lease_s=60)
    with pytest.raises(Exception, match=r"cannot be removed") as raised:
        runner.perform(task, Watch(until_s=time.monotonic() + 60))
    assert not isinstance(raised.value, Conflict)
    told = problem_of(raised.value)
    assert (told.code, str(draft_path(tmp_path / "out")) in told.message) == ("not-removed", True)
