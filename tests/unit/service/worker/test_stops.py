"""When a worker stops, releases its task, or clears away: cancels, signals, leases that are lost,
queues that are away.
"""

import logging
import os
import signal
import threading
import time

import pytest

from mlcd.artifacts.manifest import draft_path
from mlcd.errors import Unavailable
from mlcd.service.inference.engine.fake import FakeEncoder
from mlcd.service.worker.loop import RetryingQueue
from tests.conftest import write_digits
from tests.unit.service.worker.working import (
    MODEL,
    SLOW,
    planned_by_hand,
    spec,
    until,
    work,
    working,
)

pytestmark = pytest.mark.usefixtures("short_pauses")


def canceled_midway(queue, job):
    until(lambda: queue.get(job.id).shards_done >= 1)
    queue.cancel(job.id)


def test_a_canceled_job_leaves_nothing(queue, images, tmp_path):
    job = queue.submit(spec(images, tmp_path, SLOW))[0]
    canceling = threading.Thread(target=canceled_midway, args=(queue, job))
    canceling.start()
    work(queue, tmp_path, model=SLOW)
    canceling.join()
    assert not draft_path(tmp_path / "out").exists()
    assert queue.get(job.id).state == "canceled"
    assert list(tmp_path.glob("*out*")) == []
    queue.retry(job.id)
    work(queue, tmp_path, model=SLOW)
    assert queue.get(job.id).state == "succeeded"


def test_a_cancel_stops_a_shard_between_two_batches(queue, tmp_path):
    images, latency = write_digits(tmp_path / "images", 160), "fake:latency_ms=600"
    job = queue.submit(spec(images, tmp_path, latency))[0]
    batches = []

    def cancel():
        until(lambda: batches)
        queue.cancel(job.id)

    canceling = threading.Thread(target=cancel)
    canceling.start()
    with working(queue, tmp_path, model=latency, shard_images=160) as worker:
        encoder = worker._runner._equipment.encoder
        encode = encoder.encode
        encoder.encode = lambda rows: (batches.append(len(rows)), encode(rows))[1]
        worker.run(drain=True)
    canceling.join()
    assert 0 < len(batches) < 5
    until(lambda: queue.get(job.id).state == "canceled")


def test_a_signal_releases_the_task_uncounted(queue, images, tmp_path):
    job = queue.submit(spec(images, tmp_path, SLOW))[0]

    def interrupt():
        until(lambda: queue.get(job.id).shards_done >= 1)
        os.kill(os.getpid(), signal.SIGTERM)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with working(queue, tmp_path, model=SLOW) as worker:
        worker.run(drain=False)
        worker.exit_timer.cancel()
    interrupting.join()
    assert queue.get(job.id).state == "running"
    left = []
    while (task := queue.claim("other", [FakeEncoder(SLOW).fingerprint], lease_s=60)) is not None:
        left.append(task)
    assert {task.attempt for task in left} == {1}
    assert not [
        path for path in draft_path(tmp_path / "out").glob("part-*.npy") if path.stat().st_size == 0
    ]


class Leaving:
    """A queue that is away now and then, for some calls in a row."""

    def __init__(self, queue):
        self._queue, self._calls = queue, 0

    def __getattr__(self, name):
        def call(*arguments, **options):
            self._calls += 1
            if self._calls in (3, 4, 5, 9, 10, 14):
                raise Unavailable("the queue is away")
            return getattr(self._queue, name)(*arguments, **options)

        return call


def test_a_queue_that_answers_some_questions_and_not_others_is_told_of_once(caplog, monkeypatch):
    """A disk like a full one: what only reads gets through."""
    link, pauses = RetryingQueue(), []

    def write():
        raise Unavailable("the disk is full")

    for _ in range(8):
        assert link.once(lambda: 1) == 1
        assert link.once(write) is None
        pauses.append(link.wait_s)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "the job queue is unreachable"
    ]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * pauses[0]
    monkeypatch.setattr("mlcd.service.worker.loop.QUEUE_SETTLED_S", 0.0)
    assert (link.once(lambda: 1), link.wait_s) == (1, 0.0)
    assert caplog.records[-1].message == "the job queue is back"


def test_an_idle_worker_says_once_that_jobs_wait_for_others(
    queue, images, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("mlcd.service.worker.skipped_jobs.FOREIGN_JOBS_POLL_S", 0.05)
    for number in range(2):
        queue.submit(
            spec(images, tmp_path, output=str(tmp_path / f"o{number}"), fingerprint="f" * 64)
        )
    with working(queue, tmp_path) as worker:
        ending = threading.Thread(
            target=lambda: (
                until(lambda: caplog.records),
                time.sleep(0.3),
                worker._handle_signal(0, None),
            )
        )
        ending.start()
        worker.run(drain=False)
        worker.exit_timer.cancel()
        ending.join()
    assert [record.message for record in caplog.records] == [
        "2 jobs wait for workers with other models"
    ]


def test_a_worker_that_drains_clears_away_what_a_canceled_job_of_a_dead_one_has_left(
    queue, images, tmp_path
):
    job = queue.submit(spec(images, tmp_path))[0]
    queue.finish_plan(*planned_by_hand(queue, tmp_path, shard_images=8))
    queue.claim("dead", [FakeEncoder(MODEL).fingerprint], lease_s=1.0)
    queue.cancel(job.id)
    work(queue, tmp_path)
    assert not draft_path(tmp_path / "out").exists()
    assert queue.submit(spec(images, tmp_path))[1]


@pytest.mark.timeout(60)
def test_a_queue_that_comes_and_goes_is_asked_again_and_told_of_once(
    queue, images, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("mlcd.service.worker.loop.QUEUE_SETTLED_S", 0.0)
    job = queue.submit(spec(images, tmp_path))[0]
    with caplog.at_level(logging.WARNING):
        work(Leaving(queue), tmp_path)
    assert queue.get(job.id).state == "succeeded"
    told = [record.message.split(",")[0] for record in caplog.records]
    assert told == ["the job queue is unreachable", "the job queue is back"] * 3


class Frozen:
    """A queue whose renewals do not get through: they fail at once, or hang."""

    def __init__(self, queue, hanging_s):
        self._queue, self._hanging_s = queue, hanging_s

    def renew(self, *arguments, **options):
        time.sleep(self._hanging_s)
        raise Unavailable("the queue is away")

    def __getattr__(self, name):
        return getattr(self._queue, name)


@pytest.mark.parametrize(("hanging_s", "latency_ms", "lease_s"), [(0, 400, 0.2), (2, 1500, 1.2)])
def test_a_lease_that_cannot_be_renewed_ends_the_work(
    queue, images, tmp_path, hanging_s, latency_ms, lease_s
):
    """Another worker may have the task by then."""
    slow = f"fake:latency_ms={latency_ms}"
    job = queue.submit(spec(images, tmp_path, slow))[0]
    with working(Frozen(queue, hanging_s), tmp_path, model=slow, lease_s=lease_s) as worker:
        task = queue.claim("w", [FakeEncoder(slow).fingerprint], lease_s=60)
        queue.finish_plan(task, [8] * 5)
        task = queue.claim("w", [FakeEncoder(slow).fingerprint], lease_s=60)
        worker._start(task)
        while worker._task:
            worker._poll(worker._task)
    assert queue.get(job.id).shards_done == 0
    assert not list(draft_path(tmp_path / "out").glob("part-*"))


@pytest.mark.parametrize("kind", ["embed", "index"])
def test_an_output_that_was_finished_before_the_cancel_stays_and_a_retry_finds_it(
    queue, images, tmp_path, kind
):
    """This happens if a worker is killed between the last rename and its report."""
    job = queue.submit(spec(images, tmp_path, kind=kind))[0]
    with working(queue, tmp_path) as worker:
        complete = queue.complete

        def canceled_in_the_moment(task, **facts):
            if task.stage == "publish":
                queue.cancel(job.id)
            complete(task, **facts)

        queue.complete = canceled_in_the_moment
        worker.run(drain=True)
    queue.complete = complete
    assert (queue.get(job.id).state, queue.get(job.id).stage) == ("canceled", None)
    left = list_files(tmp_path / "out")
    assert left
    queue.retry(job.id)
    work(queue, tmp_path)
    assert queue.get(job.id).state == "succeeded"
    assert list_files(tmp_path / "out") == left


def list_files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_worker_whose_job_is_gone_from_the_queue_says_so_once_and_leaves_its_parts(
    queue, images, tmp_path, caplog
):
    job = queue.submit(spec(images, tmp_path, SLOW))[0]

    def lose(transaction):
        """While the worker is at another task: between two there is nothing to say."""
        record = transaction.record(job.id)
        is_lost = record.shards_done >= 1 and bool(record.leases)
        if is_lost:
            transaction.remove_with_names(job.id)
        return is_lost

    losing = threading.Thread(target=lambda: until(lambda: queue._database.transact(lose)))
    losing.start()
    with caplog.at_level(logging.WARNING):
        work(queue, tmp_path, model=SLOW)
    losing.join()
    (record,) = caplog.records
    assert record.message.startswith(f"job {job.id} is not in the queue any more")
    assert record.message.endswith(f"stays at {draft_path(tmp_path / 'out')}")
    assert draft_path(tmp_path / "out").is_dir()
