"""One suite for every job store: what is kept of jobs, how it is found, and for how long."""

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from mlcd.errors import Conflict, InvalidInput, NotFound
from mlcd.service.jobs.database import KEPT_EVENTS
from mlcd.service.jobs.job import JobProblem
from mlcd.service.jobs.service import open_queue
from mlcd.service.settings import read_settings
from tests.contract.job_stores import (
    BROKEN,
    LONG_S,
    MODEL,
    NO_JOB,
    SHORT_S,
    claim,
    finish,
    pass_away,
    planned,
    spec,
    submitted,
)


def test_jobs_are_in_the_order_of_submission_whatever_the_clock_does(tmp_path, monkeypatch):
    with contextlib.closing(
        open_queue(read_settings({"model": "hog", "state_dir": str(tmp_path)}))
    ) as store:
        ids = []
        for moment in (2e9, 1e9, 1e9, 2e9):
            monkeypatch.setattr("time.time", lambda moment=moment: moment)
            ids.append(submitted(store, len(ids)))
        assert ids == sorted(set(ids))


def test_one_key_makes_one_job(opened):
    store = opened()
    job, new = store.submit(spec(1), key="k")
    assert new
    assert store.submit(spec(1), key="k") == (job, False)
    assert opened().submit(spec(1), key="k") == (job, False)
    assert store.find_submitted("k") == job
    assert store.find_submitted("other") is None
    with pytest.raises(Conflict, match="another job"):
        store.submit(spec(2), key="k")
    finish(store, job.id)
    assert store.submit(spec(1), key="k") == (store.get(job.id), False)
    assert len(store.page(limit=10).jobs) == 1


def test_the_jobs_of_one_owner_are_listed_page_by_page_among_those_of_others(store):
    owners = ["a" if number % 7 == 0 else "b" if number % 2 else None for number in range(30)]
    ids = [store.submit(spec(number), owner=owner)[0].id for number, owner in enumerate(owners)]
    for owner in ("a", "b", "nobody"):
        own = [job_id for job_id, each in zip(ids, owners, strict=True) if each == owner][::-1]
        for limit in (1, 2, 3, 50):
            found, cursor = [], None
            while True:
                page = store.page(limit=limit, cursor=cursor, owner=owner)
                assert len(page.jobs) <= limit
                found += [job.id for job in page.jobs]
                if (cursor := page.cursor) is None:
                    break
            assert found == own
    assert len(store.page(limit=50).jobs) == 30
    store.check_owner(ids[0], "a")
    for job_id, owner in ((ids[0], "b"), (ids[2], "a"), (NO_JOB, "a"), ("x", "a")):
        with pytest.raises(NotFound, match="unknown job"):
            store.check_owner(job_id, owner)


def test_two_jobs_never_write_to_one_output(store):
    first = submitted(store)
    with pytest.raises(Conflict, match=first):
        submitted(store)
    finish(store, first)
    second = submitted(store)
    store.fail(claim(store), BROKEN, fatal=True)
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
    assert [job.id for job in store.page(limit=1, state="canceled", cursor=page.cursor).jobs] == [
        ids[3]
    ]
    assert store.page(limit=25, cursor=ids[0]) == store.page(limit=5, state="succeeded")
    for cursor in ("", "x", "0" * 19, "G" * 20, "é" * 20):
        with pytest.raises(InvalidInput, match="cursor"):
            store.page(limit=10, cursor=cursor)


def test_a_thousand_jobs_are_counted_and_claimed(store):
    ids = [submitted(store, number) for number in range(1000)]
    stats = store.stats()
    assert (stats.jobs, stats.depth) == ({"queued": 1000}, 1000)
    assert 0 < stats.oldest_wait_s < 300
    assert claim(store).job_id == ids[0]
    assert store.stats().jobs == {"queued": 999, "running": 1}


def test_events_are_every_change_in_order_and_resume_by_id(store):
    job_id = planned(store, [10, 10])
    expected = [(1, "queued"), (2, "running")]
    assert [(event.id, event.job.state) for event in store.events(job_id)][:2] == expected
    last = store.events(job_id)[-1]
    assert last.job == store.get(job_id)
    assert store.events(job_id, last.id) == []
    work = claim(store)
    assert store.renew(work, lease_s=LONG_S, done=4)
    assert store.renew(work, lease_s=LONG_S, done=4)  # says nothing new
    store.complete(work, failed_items=1)
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
            with pytest.raises(NotFound, match="unknown job"):
                act(job_id)


def test_the_depth_is_what_waits_to_be_claimed(store):
    assert store.depth() == 0
    planned(store, [1] * 5)
    submitted(store, 1)
    assert store.depth() == 6
    work = claim(store)
    assert store.depth() == 5
    store.fail(work, BROKEN)
    assert store.depth() == 6


def test_workers_live_as_long_as_their_heart_beats(store, opened):
    other = opened()
    store.heartbeat("one", MODEL, lease_s=LONG_S)
    store.heartbeat("two", MODEL, lease_s=SHORT_S)
    assert other.workers() == ["one", "two"]
    pass_away()
    assert store.workers() == ["one"]
    store.heartbeat("one", MODEL, lease_s=SHORT_S)
    pass_away()
    assert store.workers() == []


def test_a_job_keeps_every_field_of_its_spec(store):
    given = spec(
        kind="label", input="/in/ä b.tar", centers="c" * 64, top=5, threshold=-0.25, embeddings=True
    )
    job, _ = store.submit(given)
    assert store.get(job.id).spec == given
    assert claim(store).spec == replace(given)


def failed_shards(store, sizes, broken):
    """A job that has come to its end but for these shards."""
    job_id = planned(store, sizes)
    while (work := claim(store)) is not None:
        if work.shard in broken:
            store.fail(
                work,
                JobProblem(
                    "undecodable", f"shard {work.shard}, attempt {work.attempt}", "look at it"
                ),
            )
        else:
            store.complete(work)
    return job_id


def test_the_shards_that_have_failed_are_listed_with_their_reasons(store):
    job_id = failed_shards(store, [10, 20, 30, 40, 5], {1, 3, 4})
    assert store.get(job_id).state == "failed"
    page = store.failures(job_id, limit=10)
    told = [(failure.shard, failure.images, failure.problem.message) for failure in page.failures]
    assert told == [
        (1, 20, "shard 1, attempt 3"),
        (3, 40, "shard 3, attempt 3"),
        (4, 5, "shard 4, attempt 3"),
    ]
    assert (page.failures[0].problem.remedy, page.cursor) == ("look at it", None)
    first = store.failures(job_id, limit=2)
    assert (first.failures, first.cursor) == (page.failures[:2], 3)
    assert store.failures(job_id, limit=2, after=3).failures == page.failures[2:]
    assert store.failures(job_id, limit=3).cursor is None
    store.retry(job_id)
    assert store.failures(job_id, limit=10).failures == []
    lost = [claim(store, lease_s=SHORT_S) for _ in range(3)]
    store.complete(lost[0])
    for _ in range(3):
        pass_away()
        while claim(store, lease_s=SHORT_S) is not None:
            pass
    told = [
        (failure.shard, failure.problem.code)
        for failure in store.failures(job_id, limit=10).failures
    ]
    assert told == [(3, "worker-lost"), (4, "worker-lost")]


def test_a_job_without_failed_shards_has_none_to_list(store):
    job_id = submitted(store)
    for _ in range(3):
        assert store.failures(job_id, limit=10).failures == []
        store.fail(claim(store), BROKEN)  # the plan
    assert store.get(job_id).state == "failed"
    assert store.failures(job_id, limit=10).failures == []


def test_files_that_could_not_be_listed_are_counted(store):
    job_id = submitted(store)
    store.finish_plan(claim(store), [10], damaged_files=3)
    assert store.get(job_id).damaged_files == 3
    store.cancel(job_id)
    store.complete(claim(store))
    assert store.retry(job_id).damaged_files == 0


def ended(store, number, key=None):
    job_id = store.submit(spec(number), key=key)[0].id
    finish(store, job_id)
    return job_id


def test_jobs_that_ended_long_ago_are_forgotten_with_their_keys_and_the_others_stay(store):
    old = ended(store, 1, key="old")
    failed = failed_shards(store, [10, 10], {1})
    pass_away()
    new = ended(store, 2, key="new")
    live = planned(store, [10, 10], 3)
    work = claim(store)
    assert store.sweep(max_age_s=LONG_S, max_jobs=100) == 0
    assert store.sweep(max_age_s=SHORT_S, max_jobs=100) == 2
    assert store.sweep(max_age_s=SHORT_S, max_jobs=100) == 0
    for job_id in (old, failed):
        for act in (
            store.get,
            store.events,
            store.retry,
            lambda job_id: store.failures(job_id, limit=1),
        ):
            with pytest.raises(NotFound):
                act(job_id)
    assert [job.id for job in store.page(limit=10).jobs] == [live, new]
    assert store.stats().jobs == {"succeeded": 1, "running": 1}
    assert store.find_submitted("new").id == new
    assert store.find_submitted("old") is None
    again, is_new = store.submit(spec(4), key="old")
    assert (is_new, again.id > live) == (True, True)
    store.complete(work)
    assert store.get(live).shards_done == 1


def test_of_too_many_ended_jobs_those_that_ended_first_are_forgotten(store):
    slow = planned(store, [])
    ids = []
    for number in range(1, 6):
        job_id = submitted(store, number)
        store.fail(store.claim("w", [MODEL], lease_s=LONG_S, exclude={slow}), BROKEN, fatal=True)
        ids.append(job_id)
    finish(store, slow)  # the first to begin and the last to end
    assert store.sweep(max_age_s=LONG_S, max_jobs=2) == 4
    assert [job.id for job in store.page(limit=10).jobs] == [ids[-1], slow]


def test_what_is_not_over_is_never_forgotten(store):
    """Queued, running, to be cleared away, or in the hands of a worker that does not know yet."""
    submitted(store, 1)
    claim(store)
    failing = planned(store, [10, 10], 2)
    held, other = claim(store), claim(store)
    canceled = planned(store, [10], 3)
    store.cancel(canceled)
    store.fail(other, BROKEN, fatal=True)
    submitted(store, 4)
    assert store.sweep(max_age_s=0, max_jobs=1) == 0
    assert len(store.page(limit=10).jobs) == 4
    store.release(held)
    assert store.sweep(max_age_s=0, max_jobs=1) == 1
    discard = claim(store)
    assert (discard.job_id, discard.stage) == (canceled, "discard")
    store.complete(discard)
    assert store.sweep(max_age_s=0, max_jobs=1) == 1
    assert {job.id for job in store.page(limit=10).jobs}.isdisjoint({failing, canceled})


def test_nothing_is_left_of_what_was_forgotten(store, where, request):
    """Whatever there was of it: events, sizes, failures, names."""
    empty = content(where, request)
    store.submit(spec(1), key="k")
    finish(store, store.find_submitted("k").id)
    failed_shards(store, [10, 10], {1})
    canceled = submitted(store, 5)
    store.cancel(canceled)
    assert content(where, request) != empty
    assert store.sweep(max_age_s=0, max_jobs=1) == 3
    assert content(where, request) == empty


def content(where, request):
    """All that the database holds but for the last id."""
    if "redis_url" in where:
        keys = {
            line
            for line in request.getfixturevalue("redis").ask("KEYS", "*").split()
            if b":" in line
        }
        return keys - {b"mlcd:jobs:newest", b"mlcd:jobs:schema"}
    with contextlib.closing(
        sqlite3.connect(Path(where["state_dir"]) / "jobs" / "queue.sqlite")
    ) as database:
        tables = [
            name
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        return {
            name: database.execute(f"SELECT count(*) FROM {name}").fetchone() for name in tables
        }


def test_a_queue_of_the_version_before_is_brought_up(tmp_path, monkeypatch):
    monkeypatch.setattr("mlcd.service.jobs.transitions.FIRST_PAUSE_S", 0.0)
    settings = read_settings({"model": "hog", "state_dir": str(tmp_path)})
    with contextlib.closing(open_queue(settings)) as store:
        kept = submitted(store)
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs" / "queue.sqlite")) as database:
        database.execute(
            "UPDATE jobs SET record = json_remove(record, '$.key', '$.rests', '$.damaged_files', "
            "'$.refusal', '$.crc32')"
        )
        database.commit()
        database.executescript(
            "DROP TABLE failures; DROP TABLE beats; DROP INDEX jobs_ended; PRAGMA user_version = 1"
        )
    with contextlib.closing(open_queue(settings)) as store:
        assert store.cancel(kept).state == "canceled"
        failed = failed_shards(store, [10, 10], {0})
        assert len(store.failures(failed, limit=5).failures) == 1
        store.heartbeat("w", MODEL, lease_s=LONG_S)
        assert store.workers() == ["w"]
        assert store.sweep(max_age_s=0, max_jobs=1) == 2
