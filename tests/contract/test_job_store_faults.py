"""One suite for every job store: records that cannot be read, clocks that are set, and databases
that are away.
"""

import contextlib
import shutil
import signal
import sqlite3
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from mlcd.errors import ArtifactInvalid, ConfigInvalid, NotFound, Unavailable
from mlcd.service.jobs.service import open_queue
from mlcd.service.settings import read_settings
from tests.contract.job_stores import (
    BROKEN,
    LONG_S,
    MODEL,
    OTHER,
    SHORT_S,
    claim,
    finish,
    pass_away,
    planned,
    spec,
    submitted,
)

HOUR_S = 3600.0


@pytest.fixture
def damage(where, request):
    """Break the record of a job, or forget the sizes of its shards."""

    def record(job_id):
        if "redis_url" in where:
            request.getfixturevalue("redis").ask("SET", f"mlcd:jobs:record:{job_id}", "{}")
        else:
            execute(where, "UPDATE jobs SET record = '{}' WHERE id = ?", job_id)

    def sizes(job_id):
        if "redis_url" in where:
            request.getfixturevalue("redis").ask("DEL", f"mlcd:jobs:sizes:{job_id}")
        else:
            execute(where, "DELETE FROM sizes WHERE job = ?", job_id)

    return {"record": record, "sizes": sizes}


def file_of(where):
    return Path(where["state_dir"]) / "jobs" / "queue.sqlite"


def execute(where, statement, *values):
    with contextlib.closing(sqlite3.connect(file_of(where))) as database:
        database.execute(statement, values)
        database.commit()


def test_a_record_that_cannot_be_read_stops_no_other_job(store, damage, caplog):
    ids = [submitted(store, number) for number in range(3)]
    damage["record"](ids[0])
    damage["record"](ids[2])
    work = claim(store)
    assert work.job_id == ids[1]
    pages = [store.page(limit=1)]
    while pages[-1].cursor is not None:
        pages.append(store.page(limit=1, cursor=pages[-1].cursor))
    assert [job.id for page in pages for job in page.jobs] == [ids[1]]
    assert len(pages) == 3
    store.finish_plan(work, [10])
    assert finish(store, ids[1]) == [("shard", 0), ("publish", None)]
    store.stats()
    assert store.sweep(max_age_s=0, max_jobs=0) == 1
    assert not store.pending([MODEL])
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    assert all(any(job_id in line for line in told) for job_id in (ids[0], ids[2]))


def test_a_job_that_is_gone_from_the_queue_is_told_of_once_by_who_works_on_it(
    store, where, request, caplog
):
    planned(store, [10, 10])
    lost, done = claim(store), claim(store)
    if "redis_url" in where:
        request.getfixturevalue("redis").ask("FLUSHALL")
    else:
        for table in ("jobs", "names"):
            execute(where, f"DELETE FROM {table}")
    assert not store.renew(lost, lease_s=LONG_S)
    store.release(lost)
    store.complete(done)
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    for line in told:
        assert f"job {lost.job_id} is not in the queue any more" in line
        assert line.endswith("stays at /out/0.partial")
    submitted(store)
    plan = claim(store)
    store._database.transact(lambda transaction: transaction.remove_with_names(plan.job_id))
    store.finish_plan(plan, [10])
    assert len(caplog.records) == 3


def test_many_records_that_cannot_be_read_keep_no_job_waiting_for_ever(store, damage):
    for number in range(40):
        damage["record"](submitted(store, number))
    sound = submitted(store, 50)
    claims = (claim(store) for _ in range(10))
    assert next(work for work in claims if work is not None).job_id == sound


def test_a_cancel_removes_a_record_that_cannot_be_read_with_all_its_names(store, damage):
    job = store.submit(spec(), key="k")[0]
    damage["record"](job.id)
    with pytest.raises(ArtifactInvalid):
        store.get(job.id)
    with pytest.raises(NotFound, match="is now deleted"):
        store.cancel(job.id)
    assert store.page(limit=10).jobs == []
    assert store.find_submitted("k") is None
    assert store.submit(spec(), key="k")[1]
    assert store.depth() == 1


def test_what_a_worker_tells_of_a_record_that_cannot_be_read_has_no_effect(store, damage):
    planned(store, [10, 10])
    work = claim(store)
    damage["record"](work.job_id)
    assert not store.renew(work, lease_s=LONG_S)
    store.complete(work)
    store.release(work)


def test_a_job_whose_sizes_are_gone_is_passed_over_and_can_be_canceled(store, damage):
    job_id, other = planned(store, [10, 10]), submitted(store, 1)
    damage["sizes"](job_id)
    assert claim(store).job_id == other
    assert store.cancel(job_id).state == "canceled"


def test_what_is_left_to_be_done_is_pending_be_it_to_clear_away(store):
    assert not store.pending([MODEL])
    job_id = submitted(store)
    assert store.pending([OTHER, MODEL])
    assert not store.pending([OTHER])
    assert not store.pending([MODEL], exclude={job_id})
    plan = claim(store)
    store.cancel(job_id)
    assert store.pending([MODEL])  # though nothing can be claimed while the lease lasts
    store.release(plan)
    store.complete(claim(store))
    assert not store.pending([MODEL])


def test_a_job_says_that_no_worker_has_its_model_until_one_has(store, monkeypatch):
    monkeypatch.setattr("mlcd.service.jobs.transitions.WORKER_START_S", 0.0)
    store.heartbeat("other", OTHER, lease_s=LONG_S)
    ours, theirs = submitted(store), submitted(store, 1, fingerprint=OTHER)
    store.note_served()
    store.note_served()
    assert (store.get(ours).problem.code, store.get(theirs).problem) == ("no-worker", None)
    assert [event.job.problem is None for event in store.events(ours)] == [True, False]
    store.heartbeat("w", MODEL, lease_s=LONG_S)
    store.note_served()
    assert store.get(ours).problem is None
    store.heartbeat("w", MODEL, lease_s=SHORT_S)
    pass_away()
    store.note_served()
    assert store.get(ours).problem.code == "no-worker"
    assert claim(store).job_id == ours  # a worker, whatever it has told of itself
    assert store.get(ours).problem is None


def test_a_job_that_was_just_submitted_waits_for_a_worker_in_silence(store):
    job_id = submitted(store)
    store.note_served()
    assert store.get(job_id).problem is None


def test_however_many_jobs_wait_all_come_to_say_that_there_is_no_worker(store, monkeypatch):
    monkeypatch.setattr("mlcd.service.jobs.transitions.WORKER_START_S", 0.0)
    monkeypatch.setattr("mlcd.service.jobs.queue._SWEPT", 2)
    ids = [submitted(store, number) for number in range(5)]
    for _ in range(3):
        store.note_served()
    assert {store.get(job_id).problem.code for job_id in ids} == {"no-worker"}


class Offset:
    """Sets the clock of a store's database."""

    def __init__(self, store):
        self.seconds, clock = 0.0, store._database._clock
        read, clock._read = clock._read, lambda: read() + self.seconds


def test_a_clock_that_is_set_back_keeps_no_task_from_being_leased_again(store):
    clock = Offset(store)
    job_id = submitted(store)
    store.heartbeat("dead", MODEL, lease_s=0.3)
    assert claim(store, lease_s=0.3).job_id == job_id
    clock.seconds -= HOUR_S
    assert store.workers() == []
    assert claim(store, lease_s=0.3) is None  # the lease is cut to its length
    time.sleep(0.4)
    assert claim(store, lease_s=0.3).job_id == job_id


def test_a_pause_is_no_longer_for_a_clock_that_is_set_back(store, monkeypatch):
    monkeypatch.setattr("mlcd.service.jobs.transitions.FIRST_PAUSE_S", 0.2)
    for module in ("transitions", "clock"):
        monkeypatch.setattr(f"mlcd.service.jobs.{module}.LONGEST_PAUSE_S", 0.3)
    clock = Offset(store)
    planned(store, [10])
    store.fail(claim(store), BROKEN)
    clock.seconds -= HOUR_S
    claim(store)
    time.sleep(0.4)
    assert claim(store).attempt == 2


def test_a_lease_that_ends_by_a_leap_of_the_clock_costs_no_attempt(store):
    clock = Offset(store)
    planned(store, [10])
    for _ in range(5):
        assert claim(store).attempt == 1
        clock.seconds += HOUR_S
    clock.seconds += HOUR_S
    assert claim(store).attempt == 1


sqlite_only = pytest.mark.parametrize("where", ["sqlite"], indirect=True)


@contextlib.contextmanager
def held(where):
    """Holds the database by what seems to SQLite another process."""
    with contextlib.closing(sqlite3.connect(file_of(where), isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("ROLLBACK")


def canceled_in_vain(store, job_id):
    with pytest.raises(Unavailable):
        store.cancel(job_id)


@sqlite_only
def test_whoever_reads_does_not_wait_for_who_writes(where, store, monkeypatch):
    monkeypatch.setattr("mlcd.service.jobs.sqlite_file.SQLITE_TURN_S", 3.0)
    job_id = submitted(store)
    with held(where):
        writing = threading.Thread(target=canceled_in_vain, args=(store, job_id))
        writing.start()
        time.sleep(0.2)
        assert [job.id for job in store.page(limit=5).jobs] == [job_id]
        assert store.stats().depth == 1
        assert writing.is_alive()  # it still waits
        writing.join()
    assert store.cancel(job_id).state == "canceled"


@sqlite_only
def test_a_signal_is_heard_while_another_process_writes(where, store, monkeypatch):
    monkeypatch.setattr("mlcd.service.jobs.sqlite_file.SQLITE_TURN_S", 30.0)
    job_id, heard = submitted(store), []

    class Told(Exception):
        pass

    def hear(number, frame):
        heard.append(time.monotonic())
        raise Told

    before = signal.signal(signal.SIGALRM, hear)
    try:
        with held(where):
            begun_s = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Told):
                store.cancel(job_id)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert heard[0] - begun_s < 5
    assert store.cancel(job_id).state == "canceled"


@sqlite_only
def test_a_file_that_was_removed_or_replaced_is_refused_until_a_restart(
    where, store, tmp_path, caplog
):
    job_id = submitted(store)
    store.close()
    with contextlib.closing(open_queue(read_settings(where))) as running:
        shutil.copy(file_of(where), tmp_path / "older")
        submitted(running, 1)
        for change in (
            file_of(where).unlink,
            partial((tmp_path / "older").replace, file_of(where)),
        ):
            change()
            for call in (
                lambda: running.page(limit=5),
                lambda: submitted(running, 2),
                lambda: claim(running),
            ):
                with pytest.raises(Unavailable, match="was removed or replaced") as told:
                    call()
                assert str(tmp_path) not in str(told.value)
        (record,) = caplog.records
        assert str(file_of(where)) in record.message
    for suffix in ("-wal", "-shm"):
        file_of(where).with_name(f"queue.sqlite{suffix}").unlink(missing_ok=True)
    with contextlib.closing(open_queue(read_settings(where))) as restarted:
        assert [job.id for job in restarted.page(limit=5).jobs] == [job_id]


@sqlite_only
def test_only_the_log_knows_where_a_file_is_that_cannot_be_written_and_not_by_every_request(
    where, store, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("mlcd.service.jobs.sqlite_file.SQLITE_TURN_S", 0.0)
    job_id = submitted(store)
    with held(where):
        for _ in range(3):
            with pytest.raises(Unavailable) as told:
                store.cancel(job_id)
            assert str(tmp_path) not in str(told.value)
    message = f"the job queue at {file_of(where)} cannot be read or written: SQLITE_BUSY"
    assert [record.message for record in caplog.records] == [message]


@pytest.mark.redis
def test_two_queues_share_a_redis_and_nothing_else(redis):
    redis.ask("FLUSHALL")
    settings = {"model": "hog", "redis_url": redis.url}
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(contextlib.closing(open_queue(read_settings(settings | more))))
            for more in ({}, {"jobs": {"redis_prefix": "other:"}})
        )
        submitted(first)
        first.heartbeat("w", MODEL, lease_s=LONG_S)
        assert (claim(second), second.workers(), second.page(limit=5).jobs) == (None, [], [])
        assert claim(first) is not None


@pytest.mark.redis
def test_a_queue_of_another_version_is_not_touched(redis):
    redis.ask("FLUSHALL")
    redis.ask("SET", "mlcd:jobs:schema", "2")
    opened = open_queue(read_settings({"model": "hog", "redis_url": redis.url}))
    with (
        contextlib.closing(opened) as store,
        pytest.raises(ArtifactInvalid, match="another version"),
    ):
        submitted(store)


@pytest.mark.redis
def test_a_redis_that_throws_jobs_away_is_not_used(redis):
    redis.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    opened = open_queue(read_settings({"model": "hog", "redis_url": redis.url}))
    told = r"evicts any key when it is full \(maxmemory-policy allkeys-lru\)"
    try:
        with contextlib.closing(opened) as store, pytest.raises(ConfigInvalid, match=told):
            submitted(store)
    finally:
        redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")


def test_jobs_need_a_place_to_be_kept():
    with pytest.raises(ConfigInvalid, match="MLCD_STATE_DIR or MLCD_REDIS_URL"):
        open_queue(read_settings({"model": "hog"}))
