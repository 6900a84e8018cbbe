"""The progress of an index job after its images: its collection, then its index."""

import pytest

from mlcd.service.http.job_answers import describe_progress
from mlcd.service.jobs.job import JobSpec, StoredJob
from mlcd.service.jobs.transitions import cancel, complete, cut, extend, lease_task


def with_all_images_done(kind):
    """A job of 5 and 3 images at 100 s, and its last task, leased."""
    record = StoredJob("1", JobSpec(kind, "/in", "/out", fingerprint="f" * 64), "queued", 0.0)
    record, work = leased(record)
    record = cut(record, work, [5, 3], now_s=10)
    for shard in range(2):
        record, work = leased(record, now_s=10 + shard)
        assert (progress(record).stage, progress(record).done) == ("shard", (0, 5)[shard])
        record = complete(record, work, now_s=20 + shard)
    return leased(record, now_s=100)


def leased(record, now_s=0.0):
    return lease_task(
        record,
        "worker",
        lease=f"{now_s}",
        now_s=now_s,
        lease_s=30,
        images_of=lambda shard: (5, 3)[shard],
    )


def progress(record):
    return describe_progress(record.job)


def reported(record, work, done, now_s=101.0):
    record, goes_on = extend(record, work, now_s=now_s, lease_s=30, done=done)
    assert goes_on
    return record


def test_images_are_collected_and_then_indexed():
    record, work = with_all_images_done("index")
    found = []
    for done in (0, 3, 8, 13, 16, 99):
        record = reported(record, work, done)
        now = progress(record)
        found.append((now.collected, now.indexed))
        assert (now.stage, now.done, now.images, now.eta_s) == ("publish", 8, 8, None)
    assert found == [(0, 0), (3, 0), (8, 0), (8, 5), (8, 8), (8, 8)]
    record = complete(record, work, now_s=110)
    expected = ("succeeded", 8, 8)
    assert (record.state, progress(record).collected, progress(record).indexed) == expected


def test_the_pace_is_of_the_images_and_stays_when_they_are_done():
    record, work = with_all_images_done("index")
    pace = progress(record).images_per_s
    assert progress(reported(record, work, 3, now_s=1000)).images_per_s == pace > 0


def test_what_a_lost_worker_has_collected_is_counted_again():
    record, work = with_all_images_done("index")
    record, _ = leased(reported(record, work, 7), now_s=200)
    assert (progress(record).stage, progress(record).collected) == ("publish", 0)


def test_a_canceled_index_holds_nothing():
    record, work = with_all_images_done("index")
    record = cancel(reported(record, work, 7), now_s=102)
    assert (progress(record).stage, progress(record).collected) == ("discard", 0)


@pytest.mark.parametrize("kind", ["label", "embed"])
def test_other_kinds_collect_nothing(kind):
    record, work = with_all_images_done(kind)
    now = progress(reported(record, work, 5))
    assert (now.stage, now.done, now.collected, now.indexed) == ("publish", 8, None, None)


def test_the_time_that_is_left_is_told_while_images_are_done():
    record = StoredJob("1", JobSpec("embed", "/in", "/out", fingerprint="f" * 64), "queued", 0.0)
    record, work = leased(record)
    record, work = leased(cut(record, work, [5, 3], now_s=10), now_s=10)
    assert progress(record).eta_s is None
    now = progress(reported(record, work, 2, now_s=14))
    assert (now.done, now.images_per_s, now.eta_s) == (2, 0.5, 12)
    assert progress(complete(record, work, now_s=20)).eta_s == 6
