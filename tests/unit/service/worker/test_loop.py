"""The worker in this process, on a real queue: what it tells of runner that go wrong."""

import json
import logging
import os
import resource
import threading

import numpy as np
import pytest
from PIL import Image

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import draft_path
from mlcd.errors import Overloaded, Unavailable
from mlcd.service.inference.engine.fake import FakeEncoder
from mlcd.service.worker.task import Watch
from tests.unit.service.worker.working import (
    MODEL,
    archived,
    planned_by_hand,
    spec,
    until,
    work,
    working,
)

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_a_job_is_done_and_counted(queue, images, tmp_path):
    (images / "1" / "0001.png").write_bytes(b"no image")
    job = queue.submit(spec(images, tmp_path))[0]
    work(queue, tmp_path)
    done = queue.get(job.id)
    expected = ("succeeded", 5, 40, 40, 1)
    assert (done.state, done.shards_done, done.images, done.done, done.failed_items) == expected
    assert EmbeddingsArtifact.open(tmp_path / "out").num_rows == 39
    assert queue.workers() == ["worker"]


def test_a_poisoned_shard_fails_alone(queue, images, tmp_path, caplog):
    poison = images / "0" / "0000.png"
    harmless = poison.read_bytes()
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(poison)  # the fake engine fails on it
    job = queue.submit(spec(images, tmp_path))[0]
    work(queue, tmp_path)
    failed = queue.get(job.id)
    expected = ("failed", 4, 1, 32)
    assert (failed.state, failed.shards_done, failed.shards_failed, failed.done) == expected
    assert failed.problem.code == "internal-error"
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "shard 0 failed: RuntimeError"
    ] * 3
    assert not (tmp_path / "out").exists()
    poison.write_bytes(harmless)
    queue.retry(job.id)
    work(queue, tmp_path)
    assert (
        queue.get(job.id).problem.code == "input-changed"
    )  # the file has another size: the listing is another


@pytest.mark.parametrize(
    ("error", "shard_images", "tried"),
    [
        (Unavailable("the engine is away"), 8, [8, 1] * 3),  # the batch, then a blank image
        (Overloaded("the engine's queue is full"), 40, [32] * 6),
    ],
)
def test_an_engine_that_cannot_be_used_now_costs_no_attempt(
    queue, images, tmp_path, error, shard_images, tried
):
    job = queue.submit(spec(images, tmp_path))[0]
    with working(queue, tmp_path, shard_images=shard_images) as worker:
        encoder = worker._runner._equipment.encoder
        encode, calls = encoder.encode, []

        def failing(rows):
            calls.append(len(rows))
            if len(calls) < 12:
                raise error
            return encode(rows)

        encoder.encode = failing
        worker.run(drain=True)
    assert queue.get(job.id).state == "succeeded"
    assert calls[: len(tried)] == tried


def test_a_full_disk_fails_the_job_at_once_and_retry_completes_it(queue, images, tmp_path):
    job = queue.submit(spec(images, tmp_path))[0]
    with working(queue, tmp_path) as worker:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)

        make = worker._runner.perform

        def perform(task, watch):
            """With a disk that is full for the third shard: the queue's own database has another
            one.
            """
            if task.shard == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
            try:
                return make(task, watch)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        worker._runner.perform = perform
        worker.run(drain=True)
    failed = queue.get(job.id)
    assert (failed.state, failed.shards_done) == ("failed", 2)
    assert failed.problem.code == "disk-full"
    assert str(tmp_path / "out") in failed.problem.message
    queue.retry(job.id)
    work(queue, tmp_path)
    assert queue.get(job.id).state == "succeeded"
    assert EmbeddingsArtifact.open(tmp_path / "out").num_rows == 40


def test_a_job_for_other_centers_is_left_to_other_workers(queue, images, tmp_path, caplog):
    job = queue.submit(spec(images, tmp_path, kind="label", centers="c" * 64))[0]
    with caplog.at_level(logging.WARNING):
        work(queue, tmp_path)
    left = queue.get(job.id)
    assert (left.state, left.problem.code) == ("running", "other-centers")
    assert len(caplog.records) == 1
    assert "left to other workers: this worker has other centers" in caplog.records[0].message


@pytest.mark.parametrize("others", [5, 20])
def test_a_worker_with_other_settings_leaves_a_job_to_those_it_was_begun_with(
    queue, images, tmp_path, caplog, others
):
    job = queue.submit(spec(images, tmp_path))[0]
    queue.finish_plan(*planned_by_hand(queue, tmp_path, shard_images=8))
    held = [queue.claim("by hand", [FakeEncoder(MODEL).fingerprint], lease_s=60) for _ in range(3)]
    other = queue.submit(spec(images, tmp_path, output=str(tmp_path / "other")))[0]
    with caplog.at_level(logging.WARNING):
        work(queue, tmp_path, shard_images=others)  # of 20 the input has no fourth shard
    left = queue.get(job.id)
    assert (left.state, left.problem.code, left.shards_done) == ("running", "other-settings", 0)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "a job is left to other workers"
    ]
    assert "part_entries 8" in left.problem.message
    assert f"part_entries {others}" in left.problem.message
    assert queue.get(other.id).state == "succeeded"  # nothing waits behind what was left
    for task in held:
        queue.release(task)
    work(queue, tmp_path, shard_images=8)
    assert (queue.get(job.id).state, queue.get(job.id).problem) == ("succeeded", None)
    assert EmbeddingsArtifact.open(tmp_path / "out").num_rows == 40


def test_a_job_that_was_left_is_cleared_away_and_begun_anew_by_any_worker(
    queue, images, tmp_path, monkeypatch
):
    monkeypatch.setattr("mlcd.service.worker.skipped_jobs.LEFT_JOBS_POLL_S", 0.05)
    job = queue.submit(spec(images, tmp_path))[0]
    queue.finish_plan(*planned_by_hand(queue, tmp_path, shard_images=8))
    assert draft_path(tmp_path / "out").exists()

    def begin_anew():
        until(lambda: queue.get(job.id).problem is not None)
        queue.cancel(job.id)
        until(lambda: not draft_path(tmp_path / "out").exists())
        queue.retry(job.id)

    beginning = threading.Thread(target=begin_anew)
    beginning.start()
    with working(queue, tmp_path, shard_images=5) as worker:
        ending = threading.Thread(
            target=lambda: (until(lambda: ended(queue, job)), worker._handle_signal(0, None))
        )
        ending.start()
        worker.run(drain=False)
        worker.exit_timer.cancel()
        ending.join()
    beginning.join()
    assert (queue.get(job.id).state, queue.get(job.id).shards) == ("succeeded", 8)


def ended(queue, job):
    now = queue.get(job.id)  # once: between two looks it may be canceled and begun anew
    return now.ended_s is not None and now.state != "canceled"


def test_a_damaged_archive_is_counted_beside_the_images(queue, images, tmp_path):
    archived(images / "0", tmp_path / "a.tar")
    archived(images / "1", tmp_path / "b.tar")
    os.truncate(tmp_path / "b.tar", 700)
    job = queue.submit(spec(tmp_path / "*.tar", tmp_path))[0]
    work(queue, tmp_path)
    done = queue.get(job.id)
    expected = ("succeeded", len(list((images / "0").iterdir())), 1)
    assert (done.state, done.images, done.damaged_files) == expected
    errors = [
        json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()
    ]
    assert len(errors) == done.failed_items + done.damaged_files


class Waiting:
    """A clock for `Watch`."""

    now_s = 1000.0

    def monotonic(self):
        return self.now_s


def test_only_images_that_are_to_be_done_and_are_not_count_as_a_hang(monkeypatch):
    clock = Waiting()
    monkeypatch.setattr("mlcd.service.worker.task.time", clock)
    watch = Watch(until_s=1e9)

    def waits(seconds):
        clock.now_s += seconds
        return watch.stalls(5)

    assert not waits(1000)  # the input is listed
    with watch.images(3):
        assert not waits(4)
        watch.on_progress(1, 0)
        assert not waits(4)
        watch.on_progress(2, 1)
        assert waits(6)
        watch.on_progress(3, 1)
        assert not waits(1000)  # labels are looked up, the part is written
    assert not waits(1000)
