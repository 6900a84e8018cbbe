"""One suite for every job store: what clients and workers are promised, whatever keeps it."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from mlcd.errors import Conflict, InvalidInput, NotFound
from service.jobs.job import MAX_ATTEMPTS, JobSpec, Problem
from service.jobs.opening import open_queue
from service.jobs.records import KEPT_EVENTS
from service.settings import read_settings
from tests.unit.service.cached import redis_server

MODEL, OTHER = "a" * 64, "b" * 64
SHORT_S, LONG_S = 0.2, 600.0
BROKEN = Problem("undecodable", "the shard is broken")
NO_JOB = "0" * 20


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis"), "--appendonly", "yes", "--appendfsync", "always") as running:
        yield running


@pytest.fixture(params=["embedded", pytest.param("redis", marks=pytest.mark.redis)])
def where(request, tmp_path):
    """The settings that name one database."""
    settings = {"model": "hog", "state_dir": str(tmp_path)}
    if request.param == "redis":
        server = request.getfixturevalue("redis")
        server.ask("FLUSHALL")
        settings["redis_url"] = server.url
    return settings


@pytest.fixture
def opened(where):
    """Opens a store on it, as another process would."""
    with contextlib.ExitStack() as stack:

        def open_store():
            return stack.enter_context(contextlib.closing(open_queue(read_settings(where))))

        yield open_store


@pytest.fixture
def store(opened):
    return opened()


def spec(number=0, **changes):
    return JobSpec(**{"kind": "label", "input": "/in", "output": f"/out/{number}", "fingerprint": MODEL} | changes)


def submitted(store, number=0, **changes):
    return store.submit(spec(number, **changes))[0].id


def claim(store, worker="w", lease_s=LONG_S, models=(MODEL,)):
    return store.claim(worker, models, lease_s=lease_s)


def planned(store, sizes, number=0):
    """A job that has been cut into shards of so many images."""
    job_id = submitted(store, number)
    work = claim(store)
    assert (work.job_id, work.stage, work.shard, work.attempt) == (job_id, "plan", None, 1)
    store.planned(work, sizes)
    return job_id


def finish(store, job_id):
    """Do all that can be claimed of the job; the pieces that were."""
    done = []
    while (work := claim(store)) is not None:
        assert work.job_id == job_id
        if work.stage == "plan":
            store.planned(work, [10, 10])
        else:
            store.completed(work)
        done.append((work.stage, work.shard))
    return done


def pass_away():
    """Until leases of SHORT_S have ended."""
    time.sleep(SHORT_S * 1.2)


def test_a_job_goes_from_plan_over_its_shards_to_the_manifest(store):
    job, new = store.submit(spec(top=3, threshold=0.5))
    assert new
    assert (job.state, job.spec.top, job.spec.threshold, job.shards, job.images) == ("queued", 3, 0.5, None, None)
    plan = claim(store)
    assert (plan.stage, plan.spec) == ("plan", job.spec)
    assert store.get(job.id).state == "running"
    assert claim(store) is None
    store.planned(plan, [10, 20, 5])
    shards = [claim(store) for _ in range(3)]
    assert [work.shard for work in shards] == [0, 1, 2]
    assert claim(store) is None
    assert store.renew(shards[1], lease_s=LONG_S, done=7)
    assert store.get(job.id).done == 7
    for number, work in enumerate(shards):
        assert work.stage == "shard"
        store.completed(work, failed_items=number)
    job = store.get(job.id)
    assert (job.state, job.shards, job.shards_done, job.images, job.done, job.failed_items) == (
        "running",
        3,
        3,
        35,
        35,
        3,
    )
    publish = claim(store)
    assert (publish.stage, publish.shard) == ("publish", None)
    store.completed(publish)
    job = store.get(job.id)
    assert (job.state, job.problem) == ("succeeded", None)
    assert job.created_s <= job.started_s <= job.ended_s
    assert job.images_per_s > 0
    assert claim(store) is None
    assert store.depth() == 0


def test_a_job_without_shards_is_published_at_once(store):
    job_id = planned(store, [])
    assert finish(store, job_id) == [("publish", None)]
    assert store.get(job_id).state == "succeeded"


def test_a_worker_gets_work_of_its_models_only_and_the_oldest_first(store):
    first, second = submitted(store, 1), submitted(store, 2)
    foreign = submitted(store, 3, fingerprint=OTHER)
    assert claim(store, models=["c" * 64]) is None
    assert claim(store).job_id == first
    assert claim(store).job_id == second
    assert claim(store) is None
    assert claim(store, models=[MODEL, OTHER]).job_id == foreign


def test_no_two_claimers_get_the_same_piece(opened):
    stores = [opened() for _ in range(4)]
    planned(stores[0], [1] * 60)
    start, taken = threading.Barrier(8), []

    def worker(number):
        start.wait()
        while (work := claim(stores[number % 4], f"w{number}")) is not None:
            taken.append(work)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(worker, range(8)))
    assert sorted(work.shard for work in taken) == list(range(60))
    assert len({work.lease for work in taken}) == 60


def test_many_workers_bring_a_job_to_its_end_each_shard_once(opened):
    stores = [opened() for _ in range(3)]
    job_id = planned(stores[0], [3] * 40)
    done, stopped = [], threading.Event()

    def worker(number):
        store = stores[number % 3]
        while not stopped.is_set():
            work = claim(store, f"w{number}")
            if work is None:
                stopped.wait(0.005)
                continue
            assert store.renew(work, lease_s=LONG_S, done=1)
            done.append((work.stage, work.shard))
            store.completed(work, failed_items=1)
            if work.stage == "publish":
                stopped.set()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(worker, range(6)))
    assert sorted(done) == sorted([("shard", number) for number in range(40)] + [("publish", None)])
    job = store_view(stores[0], job_id)
    assert job == ("succeeded", 40, 120, 40)


def store_view(store, job_id):
    job = store.get(job_id)
    return job.state, job.shards_done, job.done, job.failed_items


def test_a_piece_whose_lease_has_ended_is_given_again_and_counted(store):
    planned(store, [10])
    lost = claim(store, "lost", SHORT_S)
    assert store.renew(lost, lease_s=SHORT_S, done=4)
    assert claim(store, "other") is None
    pass_away()
    again = claim(store, "other")
    assert (again.shard, again.attempt) == (lost.shard, 2)
    assert again.lease != lost.lease


def test_a_worker_that_slept_goes_on_where_nobody_has_its_piece(store):
    job_id = planned(store, [10])
    work = claim(store, lease_s=SHORT_S)
    pass_away()
    assert store.renew(work, lease_s=LONG_S)
    assert claim(store, "other") is None
    store.completed(work)
    assert store.get(job_id).shards_done == 1


@pytest.mark.parametrize("report", ["completed", "failed", "fatal", "release", "renew"])
def test_a_late_report_has_no_effect(store, report):
    job_id = planned(store, [10, 10])
    late = claim(store, "late", SHORT_S)
    pass_away()
    assert claim(store).shard == 1  # what was never tried goes first
    again = claim(store)
    assert (again.shard, again.attempt) == (0, 2)
    before = store.get(job_id)
    if report == "completed":
        store.completed(late, failed_items=9)
    elif report == "release":
        store.release(late)
    elif report == "renew":
        assert not store.renew(late, lease_s=LONG_S, done=10)
    else:
        store.failed(late, BROKEN, fatal=report == "fatal")
    assert store.get(job_id) == before
    assert store.renew(again, lease_s=LONG_S)
    assert claim(store) is None


def test_what_a_worker_tells_never_falls_and_is_never_more_than_there_is(store):
    job_id = planned(store, [10])
    work = claim(store)
    told = []
    for done in (4, 2, 99):
        store.renew(work, lease_s=LONG_S, done=done)
        told.append(store.get(job_id).done)
    assert told == [4, 4, 10]
    store.completed(work, failed_items=99)
    assert (store.get(job_id).done, store.get(job_id).failed_items) == (10, 10)


def test_jobs_are_in_the_order_of_submission_whatever_the_clock_does(tmp_path, monkeypatch):
    with contextlib.closing(open_queue(read_settings({"model": "hog", "state_dir": str(tmp_path)}))) as store:
        ids = []
        for moment in (2e9, 1e9, 1e9, 2e9):
            monkeypatch.setattr("service.jobs.embedded.time.time", lambda moment=moment: moment)
            ids.append(submitted(store, len(ids)))
        assert ids == sorted(set(ids))


def test_a_late_plan_has_no_effect(store):
    job_id = submitted(store)
    late = claim(store, "late", SHORT_S)
    pass_away()
    again = claim(store)
    store.planned(again, [4, 4])
    store.planned(late, [1])
    job = store.get(job_id)
    assert (job.shards, job.images) == (2, 8)
    claim(store)
    claim(store)
    assert claim(store) is None


def test_a_shard_that_keeps_failing_is_isolated_and_the_others_go_on(store):
    job_id = planned(store, [10, 10, 10])
    attempts = 0
    while (work := claim(store)) is not None:
        if work.shard == 1:
            attempts += 1
            assert work.attempt == attempts
            store.failed(work, BROKEN)
        else:
            store.completed(work)
    job = store.get(job_id)
    assert attempts == MAX_ATTEMPTS
    assert (job.state, job.shards_done, job.shards_failed, job.done, job.problem) == ("failed", 2, 1, 20, BROKEN)


def test_a_shard_that_kills_its_workers_is_isolated(store):
    job_id = planned(store, [10])
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert claim(store, lease_s=SHORT_S).attempt == attempt
        pass_away()
    assert store.get(job_id).state == "running"
    assert claim(store) is None
    job = store.get(job_id)
    assert (job.state, job.shards_failed, job.problem.code) == ("failed", 1, "worker-lost")


def test_a_plan_that_keeps_failing_fails_the_job(store):
    job_id = submitted(store)
    for _ in range(MAX_ATTEMPTS):
        store.failed(claim(store), BROKEN)
    assert (store.get(job_id).state, store.get(job_id).problem) == ("failed", BROKEN)
    store.retry(job_id)
    assert finish(store, job_id) == [("plan", None), ("shard", 0), ("shard", 1), ("publish", None)]


def test_a_release_does_not_count(store):
    planned(store, [10])
    for _ in range(2 * MAX_ATTEMPTS):
        work = claim(store)
        assert work.attempt == 1
        store.release(work)
    store.failed(claim(store), BROKEN)
    assert claim(store).attempt == 2


def test_a_fatal_failure_ends_the_job_at_once_and_a_retry_completes_it(store):
    job_id = planned(store, [10, 10, 10, 10])
    full, writing, waiting = (claim(store) for _ in range(3))
    problem = Problem("no-space", "the disk of the output is full", "free space, then retry")
    store.failed(full, problem, fatal=True)
    job = store.get(job_id)
    assert (job.state, job.problem, job.shards_failed) == ("failed", problem, 0)
    assert claim(store) is None
    assert not store.renew(waiting, lease_s=LONG_S)
    store.completed(writing)  # its part is there all the same
    store.release(waiting)
    assert store.get(job_id).state == "failed"
    assert store.depth() == 0
    job = store.retry(job_id)
    assert (job.state, job.problem, job.ended_s) == ("queued", None, None)
    assert sorted(finish(store, job_id)) == [("publish", None), ("shard", 0), ("shard", 2), ("shard", 3)]
    assert store.get(job_id).state == "succeeded"


def test_a_retry_gives_out_what_failed_and_nothing_else(store):
    job_id = planned(store, [10, 10, 10])
    while (work := claim(store)) is not None:
        store.completed(work) if work.shard != 2 else store.failed(work, BROKEN)
    assert store.retry(job_id).shards_failed == 0
    work = claim(store)
    assert (work.shard, work.attempt) == (2, 1)
    store.completed(work)
    assert finish(store, job_id) == [("publish", None)]
    with pytest.raises(Conflict, match="succeeded"):
        store.retry(job_id)


def test_only_what_failed_or_was_canceled_is_retried(store):
    job_id = submitted(store)
    with pytest.raises(Conflict, match="queued"):
        store.retry(job_id)


def test_a_job_that_nobody_has_touched_is_canceled_at_once(store):
    job_id = submitted(store)
    assert store.cancel(job_id).state == "canceled"
    assert claim(store) is None
    assert submitted(store) != job_id  # its output is free
    assert store.cancel(job_id).state == "canceled"


def test_after_a_cancel_nothing_is_given_out_but_discard_when_workers_have_let_go(store):
    job_id = planned(store, [10, 10, 10])
    one, other = claim(store), claim(store)
    assert store.renew(one, lease_s=LONG_S, done=3)
    job = store.cancel(job_id)
    assert (job.state, job.done) == ("canceled", 0)  # what is removed is not done
    assert job.ended_s is not None
    assert claim(store) is None
    assert not store.renew(one, lease_s=LONG_S, done=3)
    store.release(one)
    assert claim(store) is None
    with pytest.raises(Conflict, match=job_id):
        submitted(store)  # what was written there is not cleared away yet
    store.completed(other)
    discard = claim(store)
    assert (discard.stage, discard.shard) == ("discard", None)
    assert store.renew(discard, lease_s=LONG_S)
    store.completed(discard)
    assert store.get(job_id).state == "canceled"
    assert claim(store) is None
    assert submitted(store) != job_id


def test_discard_does_not_wait_for_a_worker_that_is_gone(store):
    job_id = planned(store, [10])
    claim(store, lease_s=SHORT_S)
    store.cancel(job_id)
    assert claim(store) is None
    pass_away()
    assert claim(store).stage == "discard"


def test_a_discard_that_keeps_failing_leaves_the_job_canceled(store):
    job_id = planned(store, [10])
    store.cancel(job_id)
    for _ in range(MAX_ATTEMPTS):
        store.failed(claim(store), BROKEN)
    assert claim(store) is None
    assert store.get(job_id).state == "canceled"


@pytest.mark.parametrize("cleared", [True, False])
def test_a_canceled_job_that_is_retried_begins_anew(store, cleared):
    job_id = planned(store, [10, 10])
    store.completed(claim(store))
    store.cancel(job_id)
    if cleared:
        store.completed(claim(store))
    job = store.retry(job_id)
    assert (job.state, job.ended_s) == ("queued", None)
    if not cleared:
        work = claim(store)
        assert work.stage == "discard"
        store.completed(work)
    job = store.get(job_id)
    assert (job.state, job.done, job.shards, job.images_per_s) == ("queued", 0, None, None)
    assert finish(store, job_id) == [("plan", None), ("shard", 0), ("shard", 1), ("publish", None)]
    assert store.get(job_id).done == 20


def test_what_has_ended_cannot_be_canceled(store):
    job_id = planned(store, [])
    finish(store, job_id)
    with pytest.raises(Conflict, match="succeeded"):
        store.cancel(job_id)


def test_one_key_makes_one_job(opened):
    store = opened()
    job, new = store.submit(spec(1), key="k")
    assert new
    assert store.submit(spec(1), key="k") == (job, False)
    assert opened().submit(spec(1), key="k") == (job, False)
    assert store.submitted("k") == job
    assert store.submitted("other") is None
    with pytest.raises(Conflict, match="another job"):
        store.submit(spec(2), key="k")
    finish(store, job.id)
    assert store.submit(spec(1), key="k") == (store.get(job.id), False)
    assert len(store.page(limit=10).jobs) == 1


def test_submissions_with_one_key_at_one_moment_make_one_job(opened):
    stores = [opened() for _ in range(4)]
    start = threading.Barrier(8)

    def submit(number):
        start.wait()
        return stores[number % 4].submit(spec(1), key="k")

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(submit, range(8)))
    assert len({job.id for job, _ in answers}) == 1
    assert [new for _, new in answers].count(True) == 1


def test_two_jobs_never_write_to_one_output(store):
    first = submitted(store)
    with pytest.raises(Conflict, match=first):
        submitted(store)
    finish(store, first)
    second = submitted(store)
    store.failed(claim(store), BROKEN, fatal=True)
    third = submitted(store)
    with pytest.raises(Conflict, match=third):
        store.retry(second)


def test_pages_are_newest_first_and_whole_while_jobs_come_and_go(store):
    ids = [submitted(store, number) for number in range(25)]
    store.cancel(ids[3])
    store.cancel(ids[20])
    assert ids == sorted(ids)
    page = store.page(limit=10)
    seen = [job.id for job in page.jobs]
    submitted(store, 100)
    while page.cursor is not None:
        page = store.page(limit=10, cursor=page.cursor)
        seen += [job.id for job in page.jobs]
    assert seen == ids[::-1]
    assert [job.id for job in store.page(limit=10, state="canceled").jobs] == [ids[20], ids[3]]
    page = store.page(limit=1, state="canceled")
    assert [job.id for job in store.page(limit=1, state="canceled", cursor=page.cursor).jobs] == [ids[3]]
    assert store.page(limit=25, cursor=ids[0]) == store.page(limit=5, state="succeeded")
    for cursor in ("", "x", "0" * 19, "G" * 20, "é" * 20):
        with pytest.raises(InvalidInput, match="cursor"):
            store.page(limit=10, cursor=cursor)


def test_a_thousand_jobs_are_listed_counted_and_claimed(store):
    ids = [submitted(store, number) for number in range(1000)]
    seen, cursor = [], None
    while True:
        page = store.page(limit=100, cursor=cursor, state="queued")
        seen += [job.id for job in page.jobs]
        if (cursor := page.cursor) is None:
            break
    assert seen == ids[::-1]
    census = store.census()
    assert (census.jobs, census.depth) == ({"queued": 1000}, 1000)
    assert 0 < census.oldest_wait_s < 300
    assert claim(store).job_id == ids[0]
    assert store.census().jobs == {"queued": 999, "running": 1}


def test_events_are_every_change_in_order_and_resume_by_id(store):
    job_id = planned(store, [10, 10])
    assert [(event.id, event.job.state) for event in store.events(job_id)][:2] == [(1, "queued"), (2, "running")]
    last = store.events(job_id)[-1]
    assert last.job == store.get(job_id)
    assert store.events(job_id, last.id) == []
    work = claim(store)
    assert store.renew(work, lease_s=LONG_S, done=4)
    assert store.renew(work, lease_s=LONG_S, done=4)  # says nothing new
    store.completed(work, failed_items=1)
    new = store.events(job_id, last.id)
    assert [(event.job.done, event.job.failed_items) for event in new] == [(4, 0), (10, 1)]
    assert [event.id for event in new] == [last.id + 1, last.id + 2]


def test_of_events_the_last_few_are_kept(store):
    job_id = planned(store, [1000])
    work = claim(store)
    for done in range(1, 3 * KEPT_EVENTS):
        store.renew(work, lease_s=LONG_S, done=done)
    events = store.events(job_id)
    assert len(events) == KEPT_EVENTS
    assert events[-1].job.done == 3 * KEPT_EVENTS - 1
    assert store.events(job_id, events[-2].id) == events[-1:]


def test_an_unknown_job_is_not_found(store):
    for act in (store.get, store.events, store.cancel, store.retry):
        for job_id in (NO_JOB, "", "x", "../../etc", "é" * 20):
            with pytest.raises(NotFound, match="no such job"):
                act(job_id)


def test_the_depth_is_what_waits_to_be_claimed(store):
    assert store.depth() == 0
    planned(store, [1] * 5)
    submitted(store, 1)
    assert store.depth() == 6
    work = claim(store)
    assert store.depth() == 5
    store.failed(work, BROKEN)
    assert store.depth() == 6


def test_workers_live_as_long_as_their_heart_beats(store, opened):
    other = opened()
    store.heartbeat("one", lease_s=LONG_S)
    store.heartbeat("two", lease_s=SHORT_S)
    assert other.workers() == ["one", "two"]
    pass_away()
    assert store.workers() == ["one"]
    store.heartbeat("one", lease_s=SHORT_S)
    pass_away()
    assert store.workers() == []


def test_what_is_kept_outlives_the_process(opened):
    store = opened()
    job_id = planned(store, [10, 20])
    work = claim(store)
    store.close()
    later = opened()
    assert later.renew(work, lease_s=LONG_S)
    later.completed(work)
    assert finish(later, job_id) == [("shard", 1), ("publish", None)]


WORKER = """
import json, sys, time
from mlcd.errors import Unavailable
from service.jobs.opening import open_queue
from service.settings import read_settings
store = open_queue(read_settings(json.loads(sys.argv[1])))
while True:
    try:
        work = store.claim("w", [sys.argv[2]], lease_s=1)
        time.sleep(0.01)
        if work is not None and work.stage == "plan":
            store.planned(work, [1] * 60)
        elif work is not None:
            store.completed(work)
    except Unavailable:
        time.sleep(0.1)
"""


def test_a_job_comes_to_its_end_whoever_is_killed(request, where, store):
    """kill -9 of both workers three times, and of Redis where it is there: every shard counts once."""
    job_id = submitted(store)

    def start():
        return subprocess.Popen([sys.executable, "-c", WORKER, json.dumps(where), MODEL])

    workers = [start(), start()]
    try:
        for num_done in (10, 20, 30):
            until(lambda num_done=num_done: store.get(job_id).shards_done >= num_done)
            for place, worker in enumerate(workers):
                worker.kill()
                worker.wait()
                workers[place] = start()
            if "redis_url" in where and num_done == 20:
                server = request.getfixturevalue("redis")
                server.stop()
                server.start()
        until(lambda: store.get(job_id).state not in ("queued", "running"))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert store_view(store, job_id) == ("succeeded", 60, 60, 0)


def until(condition):
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_processes_may_open_it_at_one_moment(where):
    """The first of them makes it."""
    code = "import json, sys; from service.jobs.opening import open_queue; from service.settings import read_settings;"
    code += "sys.stdin.read(); open_queue(read_settings(json.loads(sys.argv[1]))).depth()"
    command = [sys.executable, "-c", code, json.dumps(where)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(4)]
    for process in processes:
        process.stdin.close()
    assert [process.wait(60) for process in processes] == [0] * 4


def test_a_hundred_thousand_shards_are_claimed_one_by_one(store):
    """What is kept of a job must not grow with its shards: each claim would cost more."""
    job_id = planned(store, [1000] * 100_000)
    assert store.get(job_id).images == 100_000_000
    for number in range(50):
        work = claim(store)
        assert work.shard == number
        store.completed(work)
    assert store.get(job_id).done == 50_000
    assert store.depth() == 99_950


def test_the_pace_leaves_out_the_time_without_workers(store):
    job_id = planned(store, [1000, 1000])
    work = claim(store)
    time.sleep(0.05)
    store.completed(work)
    before = store.get(job_id).images_per_s
    time.sleep(0.4)
    work = claim(store)
    time.sleep(0.05)
    store.completed(work)
    assert store.get(job_id).images_per_s == pytest.approx(before, rel=0.5)


def test_a_job_keeps_every_field_of_its_spec(store):
    given = spec(kind="label", input="/in/ä b.tar", centers="c" * 64, top=5, threshold=-0.25, embeddings=True)
    job, _ = store.submit(given)
    assert store.get(job.id).spec == given
    assert claim(store).spec == replace(given)
