"""The worker in this process, on a real queue: what it tells of pieces that go wrong, and when it stops."""

import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mlcd.artifact import draft_path
from mlcd.embeddings import EmbeddingsArtifact
from mlcd.errors import Conflict, Overloaded, Unavailable
from mlcd.pipelines.shard import Equipment
from service.dispatch.fake import FakeEncoder
from service.jobs.job import JobSpec
from service.jobs.roots import Roots
from service.jobs.worker import Worker
from service.jobs.worker_faults import problem_of
from service.jobs.worker_link import Link
from service.jobs.worker_piece import Pieces, Watch
from tests.conftest import write_digits

MODEL = "fake:sick_s=0.05"
SLOW = "fake:latency_ms=100"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    for name in ("_AFTER_FAILURE_S", "_IDLE_S", "_ENGINE_PAUSE_S"):
        monkeypatch.setattr(f"service.jobs.worker.{name}", 0.05)
    monkeypatch.setattr("service.jobs.worker_link._FIRST_WAIT_S", 0.02)
    monkeypatch.setattr("service.jobs.transitions.FIRST_PAUSE_S", 0.05)


@pytest.fixture
def images(tmp_path):
    return write_digits(tmp_path / "images", 40)


@contextlib.contextmanager
def working(store, tmp_path, model=MODEL, lease_s=30.0, shard_images=8, root=None):
    with ThreadPoolExecutor(1) as computing:
        equipment = Equipment(FakeEncoder(model), None, num_threads=2)
        pieces = Pieces(equipment, Roots([str(root or tmp_path)]), shard_images=shard_images)
        yield Worker(store, pieces, computing, name="worker", lease_s=lease_s, stall_s=60.0)


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


def test_a_job_is_done_and_counted(queue, images, tmp_path):
    (images / "1" / "0001.png").write_bytes(b"no image")
    job = queue.submit(spec(images, tmp_path))[0]
    work(queue, tmp_path)
    done = queue.get(job.id)
    assert (done.state, done.shards_done, done.images, done.done, done.failed_items) == ("succeeded", 5, 40, 40, 1)
    assert EmbeddingsArtifact.open(tmp_path / "out").num_rows == 39
    assert queue.workers() == ["worker"]


def test_a_poisoned_shard_fails_alone(queue, images, tmp_path, caplog):
    poison = images / "0" / "0000.png"
    harmless = poison.read_bytes()
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(poison)  # the fake engine fails on it
    job = queue.submit(spec(images, tmp_path))[0]
    work(queue, tmp_path)
    failed = queue.get(job.id)
    assert (failed.state, failed.shards_done, failed.shards_failed, failed.done) == ("failed", 4, 1, 32)
    assert failed.problem.code == "internal-error"
    assert [record.message.split(" (")[0] for record in caplog.records] == ["shard 0 failed: RuntimeError"] * 3
    assert not (tmp_path / "out").exists()
    poison.write_bytes(harmless)
    queue.retry(job.id)
    work(queue, tmp_path)
    assert queue.get(job.id).problem.code == "input-changed"  # the file has another size: the listing is another


def test_an_engine_that_is_away_costs_no_attempt(queue, images, tmp_path):
    job = queue.submit(spec(images, tmp_path))[0]
    with working(queue, tmp_path) as worker:
        encoder = worker._pieces._equipment.encoder
        encode, calls = encoder.encode, []

        def failing(rows):
            calls.append(len(rows))
            if len(calls) < 12:  # of each try: the batch and the blank image
                raise Unavailable("the engine is away")
            return encode(rows)

        encoder.encode = failing
        worker.run(drain=True)
    assert queue.get(job.id).state == "succeeded"
    assert calls[:4] == [8, 1, 8, 1]


def test_a_full_disk_fails_the_job_at_once_and_retry_completes_it(queue, images, tmp_path):
    job = queue.submit(spec(images, tmp_path))[0]
    with working(queue, tmp_path) as worker:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)

        make = worker._pieces.perform

        def perform(piece, watch):
            """With a disk that is full for the third shard: the queue's own database has another one."""
            if piece.shard == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
            try:
                return make(piece, watch)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        worker._pieces.perform = perform
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
def test_a_worker_with_other_settings_leaves_a_job_to_those_it_was_begun_with(queue, images, tmp_path, caplog, others):
    job = queue.submit(spec(images, tmp_path))[0]
    queue.planned(*planned_by_hand(queue, tmp_path, shard_images=8))
    held = [queue.claim("by hand", [FakeEncoder(MODEL).fingerprint], lease_s=60) for _ in range(3)]
    other = queue.submit(spec(images, tmp_path, output=str(tmp_path / "other")))[0]
    with caplog.at_level(logging.WARNING):
        work(queue, tmp_path, shard_images=others)  # of 20 the input has no fourth shard
    left = queue.get(job.id)
    assert (left.state, left.problem.code, left.shards_done) == ("running", "other-settings", 0)
    assert [record.message.split(":")[0] for record in caplog.records] == ["a job is left to other workers"]
    assert "part_entries 8" in left.problem.message
    assert f"part_entries {others}" in left.problem.message
    assert queue.get(other.id).state == "succeeded"  # nothing waits behind what was left
    for piece in held:
        queue.release(piece)
    work(queue, tmp_path, shard_images=8)
    assert (queue.get(job.id).state, queue.get(job.id).problem) == ("succeeded", None)
    assert EmbeddingsArtifact.open(tmp_path / "out").num_rows == 40


def planned_by_hand(queue, tmp_path, shard_images):
    """The piece, and the shards that it was cut into by a worker with this setting."""
    piece = queue.claim("by hand", [FakeEncoder(MODEL).fingerprint], lease_s=60)
    pieces = Pieces(
        Equipment(FakeEncoder(MODEL), None, num_threads=2), Roots([str(tmp_path)]), shard_images=shard_images
    )
    return piece, pieces.perform(piece, Watch(until_s=time.monotonic() + 60)).sizes


def test_a_job_that_was_left_is_cleared_away_and_begun_anew_by_any_worker(queue, images, tmp_path, monkeypatch):
    monkeypatch.setattr("service.jobs.worker._LEFT_LOOK_S", 0.05)
    job = queue.submit(spec(images, tmp_path))[0]
    queue.planned(*planned_by_hand(queue, tmp_path, shard_images=8))
    assert draft_path(tmp_path / "out").exists()

    def begin_anew():
        until(lambda: queue.get(job.id).problem is not None)
        queue.cancel(job.id)
        until(lambda: not draft_path(tmp_path / "out").exists())
        queue.retry(job.id)

    beginning = threading.Thread(target=begin_anew)
    beginning.start()
    with working(queue, tmp_path, shard_images=5) as worker:
        ending = threading.Thread(target=lambda: (until(lambda: ended(queue, job)), worker._told_to_stop(0, None)))
        ending.start()
        worker.run(drain=False)
        worker.last_resort.cancel()
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
    assert (done.state, done.images, done.damaged_files) == ("succeeded", len(list((images / "0").iterdir())), 1)
    errors = [json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    assert len(errors) == done.failed_items + done.damaged_files


def test_an_engine_that_is_busy_with_others_work_costs_no_attempt(queue, images, tmp_path):
    job = queue.submit(spec(images, tmp_path))[0]
    with working(queue, tmp_path, shard_images=40) as worker:
        encoder = worker._pieces._equipment.encoder
        encode, calls = encoder.encode, []

        def busy(rows):
            calls.append(len(rows))
            if len(calls) < 6:
                raise Overloaded("the engine's queue is full")
            return encode(rows)

        encoder.encode = busy
        worker.run(drain=True)
    assert queue.get(job.id).state == "succeeded"
    assert calls[:6] == [32] * 6


class Waiting:
    """A clock for `Watch`."""

    now_s = 1000.0

    def monotonic(self):
        return self.now_s


def test_only_images_that_are_to_be_done_and_are_not_count_as_a_hang(monkeypatch):
    clock = Waiting()
    monkeypatch.setattr("service.jobs.worker_piece.time", clock)
    watch = Watch(until_s=1e9)

    def waits(seconds):
        clock.now_s += seconds
        return watch.stalls(5)

    assert not waits(1000)  # the input is listed
    with watch.images(3):
        assert not waits(4)
        watch.told(1, 0)
        assert not waits(4)
        watch.told(2, 1)
        assert waits(6)
        watch.told(3, 1)
        assert not waits(1000)  # labels are looked up, the part is written
    assert not waits(1000)


def test_an_input_that_is_gone_fails_at_the_first_try(queue, images, tmp_path, caplog):
    job = queue.submit(spec(images, tmp_path))[0]
    shutil.rmtree(images)
    work(queue, tmp_path)
    assert queue.get(job.id).problem.code == "not-found"
    assert len(caplog.records) == 1


def archived(folder, path):
    with tarfile.open(path, "w") as tar:
        for file in sorted(folder.glob("*.png")):
            tar.add(file, file.name)


def test_links_that_lead_out_of_the_roots_are_not_followed(queue, images, tmp_path, tmp_path_factory, caplog):
    """Nor those that were made after the job was accepted."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret.tar"
    archived(images / "0", tmp_path / "a.tar")
    archived(images / "1", elsewhere)
    (tmp_path / "b.tar").symlink_to(elsewhere)
    job = queue.submit(spec(tmp_path / "*.tar", tmp_path))[0]
    work(queue, tmp_path)
    failed = queue.get(job.id)
    assert failed.state == "failed"
    assert (failed.problem.code, str(elsewhere) in failed.problem.message) == ("forbidden", False)
    assert (failed.stage, len(caplog.records)) == ("plan", 1)  # it was not even listed
    assert not list(draft_path(tmp_path / "out").glob("part-*"))


def moved_away(folder, elsewhere):
    """As who may write in a root could do while a job waits."""
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)


@pytest.mark.parametrize("stage", ["plan", "shard", "publish"])
def test_an_output_whose_folder_was_replaced_by_a_link_is_not_written(queue, images, tmp_path, tmp_path_factory, stage):
    place, elsewhere = tmp_path / "place", tmp_path_factory.mktemp("outside") / "place"
    place.mkdir()
    job = queue.submit(spec(images, tmp_path, output=str(place / "out")))[0]
    with working(queue, tmp_path) as worker:
        make = worker._pieces.perform

        def perform(piece, watch):
            if piece.stage == stage and not place.is_symlink():
                moved_away(place, elsewhere)
                perform.before = sorted(elsewhere.rglob("*"))
            return make(piece, watch)

        worker._pieces.perform = perform
        worker.run(drain=True)
    failed = queue.get(job.id)
    assert (failed.state, failed.problem.code, failed.stage) == ("failed", "forbidden", stage)
    assert sorted(elsewhere.rglob("*")) == perform.before


def test_an_input_or_output_that_leads_elsewhere_in_the_roots_fails_its_job_at_once(queue, images, tmp_path, caplog):
    queue.submit(spec(images, tmp_path))
    draft_path(tmp_path / "out").symlink_to(tmp_path)
    moving = queue.submit(spec(images, tmp_path, output=str(tmp_path / "other")))[0]
    work(queue, tmp_path)
    assert queue.get(moving.id).state == "succeeded"
    moved_away(images, tmp_path / "images-2")
    queue.submit(spec(images, tmp_path, output=str(tmp_path / "third")))
    work(queue, tmp_path)
    codes = {Path(job.spec.output).name: job.problem and job.problem.code for job in queue.page(limit=9).jobs}
    assert codes == {"out": "place-moved", "other": None, "third": "place-moved"}
    assert len(caplog.records) == 2
    assert not (tmp_path / "third.partial").exists()


def test_a_worker_with_other_roots_leaves_a_job_and_what_it_has_written_to_others(queue, images, tmp_path, caplog):
    (tmp_path / "mine").mkdir()
    job = queue.submit(spec(images, tmp_path))[0]
    with caplog.at_level(logging.WARNING):
        work(queue, tmp_path, root=tmp_path / "mine")
    left = queue.get(job.id)
    assert (left.state, left.problem.code) == ("running", "other-roots")
    assert not draft_path(tmp_path / "out").exists()
    queue.planned(*planned_by_hand(queue, tmp_path, shard_images=8))
    queue.cancel(job.id)
    work(queue, tmp_path, root=tmp_path / "mine")
    assert draft_path(tmp_path / "out").exists()
    assert queue.get(job.id).stage == "discard"
    assert len(caplog.records) == 2
    work(queue, tmp_path)
    assert not draft_path(tmp_path / "out").exists()


def test_names_that_are_no_text_are_told_and_end_no_worker(queue, tmp_path, caplog):
    """Surrogates cannot be kept as JSON, escapes would be run by terminals."""
    name = os.fsdecode(b"caf\xe9\x1b[31m.parquet")
    with (tmp_path / name).open("wb") as file:
        pq.write_table(pa.table({"text": ["a"]}), file)
    job = queue.submit(spec(tmp_path / "*.parquet", tmp_path))[0]
    work(queue, tmp_path)
    failed = queue.get(job.id)
    assert failed.state == "failed"
    assert failed.problem.message.isprintable()
    assert "caf\\xe9\\x1b[31m.parquet" in failed.problem.message
    assert "caf\\xe9\\x1b[31m.parquet has no image column" in caplog.records[0].message


def test_a_problem_can_be_kept_whatever_a_file_is_called():
    told = problem_of(Conflict(os.fsdecode(b"/caf\xe9\n.tar changed"), remedy=os.fsdecode(b"mend \xff")))
    assert (told.message, told.remedy) == ("/caf\\xe9\\n.tar changed", "mend \\xff")


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
        encoder = worker._pieces._equipment.encoder
        encode = encoder.encode
        encoder.encode = lambda rows: (batches.append(len(rows)), encode(rows))[1]
        worker.run(drain=True)
    canceling.join()
    assert 0 < len(batches) < 5
    until(lambda: queue.get(job.id).state == "canceled")


def test_a_signal_gives_the_piece_back_uncounted(queue, images, tmp_path):
    job = queue.submit(spec(images, tmp_path, SLOW))[0]

    def interrupt():
        until(lambda: queue.get(job.id).shards_done >= 1)
        os.kill(os.getpid(), signal.SIGTERM)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with working(queue, tmp_path, model=SLOW) as worker:
        worker.run(drain=False)
        worker.last_resort.cancel()
    interrupting.join()
    assert queue.get(job.id).state == "running"
    left = []
    while (piece := queue.claim("other", [FakeEncoder(SLOW).fingerprint], lease_s=60)) is not None:
        left.append(piece)
    assert {piece.attempt for piece in left} == {1}
    assert not [path for path in draft_path(tmp_path / "out").glob("part-*.npy") if path.stat().st_size == 0]


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
    """As with a full disk: what only reads gets through."""
    link, pauses = Link(), []

    def write():
        raise Unavailable("the disk is full")

    for _ in range(8):
        assert link.once(lambda: 1) == 1
        assert link.once(write) is None
        pauses.append(link.wait_s)
    assert [record.message.split(",")[0] for record in caplog.records] == ["the job queue is away"]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * pauses[0]
    monkeypatch.setattr("service.jobs.worker_link._SETTLED_S", 0.0)
    assert (link.once(lambda: 1), link.wait_s) == (1, 0.0)
    assert caplog.records[-1].message == "the job queue is back"


def test_an_idle_worker_says_once_that_jobs_wait_for_others(queue, images, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("service.jobs.worker._OTHERS_LOOK_S", 0.05)
    for number in range(2):
        queue.submit(spec(images, tmp_path, output=str(tmp_path / f"o{number}"), fingerprint="f" * 64))
    with working(queue, tmp_path) as worker:
        ending = threading.Thread(
            target=lambda: (until(lambda: caplog.records), time.sleep(0.3), worker._told_to_stop(0, None))
        )
        ending.start()
        worker.run(drain=False)
        worker.last_resort.cancel()
        ending.join()
    assert [record.message for record in caplog.records] == ["2 jobs wait for workers with other models"]


def test_a_worker_that_drains_clears_away_what_a_canceled_job_of_a_dead_one_has_left(queue, images, tmp_path):
    job = queue.submit(spec(images, tmp_path))[0]
    queue.planned(*planned_by_hand(queue, tmp_path, shard_images=8))
    queue.claim("dead", [FakeEncoder(MODEL).fingerprint], lease_s=1.0)
    queue.cancel(job.id)
    work(queue, tmp_path)
    assert not draft_path(tmp_path / "out").exists()
    assert queue.submit(spec(images, tmp_path))[1]


@pytest.mark.timeout(60)
def test_a_queue_that_comes_and_goes_is_asked_again_and_told_of_once(queue, images, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("service.jobs.worker_link._SETTLED_S", 0.0)
    job = queue.submit(spec(images, tmp_path))[0]
    with caplog.at_level(logging.WARNING):
        work(Leaving(queue), tmp_path)
    assert queue.get(job.id).state == "succeeded"
    told = [record.message.split(",")[0] for record in caplog.records]
    assert told == ["the job queue is away", "the job queue is back"] * 3


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
def test_a_lease_that_cannot_be_renewed_ends_the_work(queue, images, tmp_path, hanging_s, latency_ms, lease_s):
    """Another worker may have the piece by then."""
    slow = f"fake:latency_ms={latency_ms}"
    job = queue.submit(spec(images, tmp_path, slow))[0]
    with working(Frozen(queue, hanging_s), tmp_path, model=slow, lease_s=lease_s) as worker:
        piece = queue.claim("w", [FakeEncoder(slow).fingerprint], lease_s=60)
        queue.planned(piece, [8] * 5)
        piece = queue.claim("w", [FakeEncoder(slow).fingerprint], lease_s=60)
        worker._do(piece)
    assert queue.get(job.id).shards_done == 0
    assert not list(draft_path(tmp_path / "out").glob("part-*"))


@pytest.mark.parametrize("kind", ["embed", "index"])
def test_an_output_that_was_finished_before_the_cancel_stays_and_a_retry_finds_it(queue, images, tmp_path, kind):
    """As where a worker is killed between the last rename and its report."""
    job = queue.submit(spec(images, tmp_path, kind=kind))[0]
    with working(queue, tmp_path) as worker:
        complete = queue.completed

        def canceled_in_the_moment(piece, **facts):
            if piece.stage == "publish":
                queue.cancel(job.id)
            complete(piece, **facts)

        queue.completed = canceled_in_the_moment
        worker.run(drain=True)
    queue.completed = complete
    assert (queue.get(job.id).state, queue.get(job.id).stage) == ("canceled", None)
    left = list_files(tmp_path / "out")
    assert left
    queue.retry(job.id)
    work(queue, tmp_path)
    assert queue.get(job.id).state == "succeeded"
    assert list_files(tmp_path / "out") == left


def list_files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_worker_whose_job_is_gone_from_the_queue_says_so_once_and_leaves_its_parts(queue, images, tmp_path, caplog):
    job = queue.submit(spec(images, tmp_path, SLOW))[0]

    def lose(transaction):
        """While the worker is at another piece: between two there is nothing to say."""
        record = transaction.record(job.id)
        is_lost = record.shards_done >= 1 and bool(record.leases)
        if is_lost:
            transaction.wipe(job.id)
        return is_lost

    losing = threading.Thread(target=lambda: until(lambda: queue._records.transact(lose)))
    losing.start()
    with caplog.at_level(logging.WARNING):
        work(queue, tmp_path, model=SLOW)
    losing.join()
    (record,) = caplog.records
    assert record.message.startswith(f"job {job.id} is not in the queue any more")
    assert record.message.endswith(f"stays at {draft_path(tmp_path / 'out')}")
    assert draft_path(tmp_path / "out").is_dir()
