"""One suite for every job store: the course of a job, whatever keeps it, task by task, with all
that goes wrong.
"""

import time

import pytest

from mlcd.errors import Conflict
from mlcd.service.jobs.job import MAX_ATTEMPTS, JobProblem
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


def test_a_job_goes_from_plan_over_its_shards_to_the_manifest(store):
    job, new = store.submit(spec(top=3, threshold=0.5))
    assert new
    expected = ("queued", 3, 0.5, None, None)
    assert (job.state, job.spec.top, job.spec.threshold, job.shards, job.images) == expected
    plan = claim(store)
    assert (plan.stage, plan.spec) == ("plan", job.spec)
    assert store.get(job.id).state == "running"
    assert claim(store) is None
    store.finish_plan(plan, [10, 20, 5])
    shards = [claim(store) for _ in range(3)]
    assert [work.shard for work in shards] == [0, 1, 2]
    assert claim(store) is None
    assert store.renew(shards[1], lease_s=LONG_S, done=7)
    assert store.get(job.id).done == 7
    for number, work in enumerate(shards):
        assert work.stage == "shard"
        store.complete(work, failed_items=number)
    job = store.get(job.id)
    found = (job.state, job.shards, job.shards_done, job.images, job.done, job.failed_items)
    assert found == ("running", 3, 3, 35, 35, 3)
    publish = claim(store)
    assert (publish.stage, publish.shard) == ("publish", None)
    store.complete(publish)
    job = store.get(job.id)
    assert (job.state, job.problem) == ("succeeded", None)
    assert job.created_s <= job.started_s <= job.ended_s
    assert job.images_per_s > 0
    assert claim(store) is None
    assert store.depth() == 0


def test_a_worker_gets_work_of_its_models_only_and_the_oldest_first(store):
    first, second = submitted(store, 1), submitted(store, 2)
    foreign = submitted(store, 3, fingerprint=OTHER)
    assert claim(store, models=["c" * 64]) is None
    assert claim(store).job_id == first
    assert claim(store).job_id == second
    assert claim(store) is None
    assert claim(store, models=[MODEL, OTHER]).job_id == foreign


def test_keys_take_turns_and_a_key_s_own_jobs_come_by_age(store):
    """A small job of one key ends soon while a large one of another is done."""
    large, later = (store.submit(spec(number), owner="a")[0].id for number in (0, 1))
    store.finish_plan(claim(store), [10] * 50)
    for _ in range(3):
        work = claim(store)
        assert work.job_id == large
        store.complete(work)
    small = store.submit(spec(2), owner="b")[0].id
    order = []
    while store.get(small).state != "succeeded":
        work = claim(store)
        order.append(work.job_id)
        if work.stage == "plan":
            store.finish_plan(work, [10, 10])
        else:
            store.complete(work)
    assert order == [small, large, small, large, small, large, small]
    assert claim(store).job_id == large
    assert store.get(later).state == "queued"


def test_a_task_whose_lease_has_ended_is_leased_again_and_counted(store):
    planned(store, [10])
    lost = claim(store, "lost", SHORT_S)
    assert store.renew(lost, lease_s=SHORT_S, done=4)
    assert claim(store, "other") is None
    pass_away()
    again = claim(store, "other")
    assert (again.shard, again.attempt) == (lost.shard, 2)
    assert again.lease != lost.lease


def test_what_a_worker_tells_never_falls_and_is_never_more_than_there_is(store):
    job_id = planned(store, [10])
    work = claim(store)
    told = []
    for done in (4, 2, 99):
        store.renew(work, lease_s=LONG_S, done=done)
        told.append(store.get(job_id).done)
    assert told == [4, 4, 10]
    store.complete(work, failed_items=99)
    assert (store.get(job_id).done, store.get(job_id).failed_items) == (10, 10)


def test_a_late_plan_has_no_effect(store):
    job_id = submitted(store)
    late = claim(store, "late", SHORT_S)
    pass_away()
    again = claim(store)
    store.finish_plan(again, [4, 4])
    store.finish_plan(late, [1])
    job = store.get(job_id)
    assert (job.shards, job.images) == (2, 8)
    for _ in range(2):
        store.complete(claim(store))
    assert store.get(job_id).done == 8


def test_a_fatal_failure_ends_the_job_at_once_and_a_retry_completes_it(store):
    job_id = planned(store, [10, 10, 10, 10])
    full, writing, waiting = (claim(store) for _ in range(3))
    problem = JobProblem("no-space", "the disk of the output is full", "free space, then retry")
    store.fail(full, problem, fatal=True)
    job = store.get(job_id)
    assert (job.state, job.problem, job.shards_failed) == ("failed", problem, 0)
    assert claim(store) is None
    assert not store.renew(waiting, lease_s=LONG_S)
    store.complete(writing)  # its part is there all the same
    store.release(waiting)
    assert store.get(job_id).state == "failed"
    assert store.depth() == 0
    job = store.retry(job_id)
    assert (job.state, job.problem, job.ended_s) == ("queued", None, None)
    expected = [("publish", None), ("shard", 0), ("shard", 2), ("shard", 3)]
    assert sorted(finish(store, job_id)) == expected
    assert store.get(job_id).state == "succeeded"


def test_a_job_that_nobody_has_touched_is_canceled_at_once(store):
    job_id = submitted(store)
    assert store.cancel(job_id).state == "canceled"
    assert claim(store) is None
    assert submitted(store) != job_id  # its output is free
    assert store.cancel(job_id).state == "canceled"


def test_after_a_cancel_nothing_is_leased_but_discard_when_workers_have_let_go(store):
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
    store.complete(other)
    discard = claim(store)
    assert (discard.stage, discard.shard) == ("discard", None)
    assert store.renew(discard, lease_s=LONG_S)
    store.complete(discard)
    assert store.get(job_id).state == "canceled"
    assert claim(store) is None
    assert submitted(store) != job_id


def test_a_hundred_thousand_shards_are_claimed_one_by_one(store):
    """The stored data of a job must not grow with its shards, or each claim would cost more."""
    job_id = planned(store, [1000] * 100_000)
    assert store.get(job_id).images == 100_000_000
    for number in range(50):
        work = claim(store)
        assert work.shard == number
        store.complete(work)
    assert store.get(job_id).done == 50_000
    assert store.depth() == 99_950


def test_a_task_that_failed_is_leased_again_after_ever_longer_pauses_and_the_others_at_once(
    store, monkeypatch
):
    monkeypatch.setattr("mlcd.service.jobs.transitions.FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr("mlcd.service.jobs.transitions.LONGEST_PAUSE_S", 1.5)  # less than the next
    job_id = planned(store, [10, 10, 10])
    first = claim(store)
    failed_s = time.monotonic()
    store.fail(first, BROKEN)
    assert claim(store).shard == 1
    assert claim(store).shard == 2
    assert claim(store) is None
    assert (store.depth(), store.get(job_id).state) == (1, "running")
    again = until_claimed(store)
    assert (again.shard, again.attempt) == (0, 2)
    assert time.monotonic() - failed_s >= 1.0
    failed_s = time.monotonic()
    store.fail(again, BROKEN)
    assert until_claimed(store).attempt == 3
    assert time.monotonic() - failed_s >= 1.5


def until_claimed(store):
    limit = time.monotonic() + 30
    while (work := claim(store)) is None:
        assert time.monotonic() < limit
        time.sleep(0.01)
    return work


def test_a_pause_keeps_no_other_job_waiting_and_a_retry_ends_it(store, monkeypatch):
    monkeypatch.setattr("mlcd.service.jobs.transitions.FIRST_PAUSE_S", LONG_S)
    job_id = planned(store, [10, 10])
    store.fail(claim(store), BROKEN)
    other = submitted(store, 1)
    store.fail(claim(store), JobProblem("disk-full", "full"), fatal=True)
    assert claim(store).job_id == other
    store.retry(job_id)
    assert sorted(claim(store).shard for _ in range(2)) == [0, 1]


def test_a_worker_that_cannot_do_a_job_leaves_it_to_others_uncounted_and_the_job_says_so(store):
    job_id = planned(store, [10, 10])
    misfit = JobProblem("other-settings", "begun with another engine", "start a worker with that")
    for _ in range(2 * MAX_ATTEMPTS):
        work = claim(store)
        assert work.attempt == 1
        store.refuse(work, misfit)
    job = store.get(job_id)
    assert (job.state, job.problem, store.events(job_id)[-1].job) == ("running", misfit, job)
    later = submitted(store, 1)
    assert store.claim("w", [MODEL], lease_s=LONG_S, exclude={job_id}).job_id == later
    assert store.claim("w", [MODEL], lease_s=LONG_S, exclude={job_id}) is None
    work = claim(store)
    assert store.get(job_id).problem == misfit  # it may be the next one that cannot
    store.complete(work)
    assert store.get(job_id).problem is None
    store.refuse(claim(store), misfit)
    assert store.cancel(job_id).problem is None


def test_however_many_jobs_are_left_the_next_one_is_found(store):
    left = {submitted(store, number) for number in range(40)}
    last = submitted(store, 40)
    assert store.claim("w", [MODEL], lease_s=LONG_S, exclude=left).job_id == last
