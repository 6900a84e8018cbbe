"""The life of a job by random sequences of events, against a plain model of where each shard is."""

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlcd.errors import Conflict
from mlcd.service.jobs.job import (
    FINISHED,
    MAX_ATTEMPTS,
    JobProblem,
    JobSpec,
    StoredJob,
    record_from_json,
    record_to_json,
)
from mlcd.service.jobs.transitions import (
    cancel,
    complete,
    cut,
    extend,
    fail,
    is_over,
    lease_task,
    release_task,
    retry,
)
from mlcd.service.timings import LONGEST_PAUSE_S

SPEC = JobSpec("label", "/in", "/out", fingerprint="f" * 64)
PROBLEM, MISFIT = JobProblem("broken", "…"), JobProblem("misfit", "…")
PAUSES_S = (4.0, 16.0, 60.0)
"""After the first, the second, and every later failure."""
LEASE_S = 10.0
PICK = st.integers(0, 1000)


@dataclass
class Task:
    """where: waits, leased, done, failed."""

    where: str = "waits"
    attempts: int = 0
    retry_at_s: float = 0.0


@dataclass
class Model:
    stage: str | None = "plan"
    state: str = "queued"
    touched: bool = False
    left: bool = False
    """The shard was left by a worker that could not do a part of it, and nobody has continued
    since.
    """
    tasks: list[Task] = field(default_factory=lambda: [Task()])


class Held:
    """A lease in the hands of a worker, which it keeps when it has ended, too."""

    def __init__(self, work, task, until_s):
        self.work, self.task, self.until_s = work, task, until_s


class Jobs(RuleBasedStateMachine):
    @initialize(sizes=st.lists(st.integers(0, 5), max_size=4))
    def submit(self, sizes):
        self.sizes, self.now_s, self.number = sizes, 1000.0, 0
        self.record = StoredJob("j", SPEC, "queued", self.now_s)
        self.model, self.held, self.ended = Model(), [], []

    @rule(seconds=st.sampled_from([0.0, 1.0, PAUSES_S[0], LEASE_S, 5 * LEASE_S]))
    def wait(self, seconds):
        self.now_s += seconds

    @rule()
    def claim(self):
        self.number += 1
        record, work = lease_task(
            self.record,
            "w",
            lease=str(self.number),
            now_s=self.now_s,
            lease_s=LEASE_S,
            images_of=self.sizes.__getitem__,
        )
        self.keep(record)
        # Whoever asks finds what has been lost.
        for held in [held for held in self.held if held.until_s <= self.now_s]:
            self.held.remove(held)
            self.ended.append(held)
            if held.work.stage == self.model.stage and self.model.state != "failed":
                self.strike(held.task)
        free = [
            number
            for number, task in enumerate(self.model.tasks)
            if task.where == "waits" and task.retry_at_s <= self.now_s
        ]
        blocked = self.model.stage == "discard" and self.held
        if self.model.stage is None or self.model.state == "failed" or not free or blocked:
            assert work is None
            return
        assert work is not None
        task = 0 if work.shard is None else work.shard
        assert (work.stage, task in free) == (self.model.stage, True)
        self.model.tasks[task].where = "leased"
        self.model.tasks[task].attempts += 1
        assert work.attempt == self.model.tasks[task].attempts
        assert work.attempt <= MAX_ATTEMPTS or work.stage == "discard"
        self.model.touched = True
        if self.model.stage != "discard":
            self.model.state = "running"
        self.held.append(Held(work, task, self.now_s + LEASE_S))

    @precondition(lambda self: self.held)
    @rule(pick=PICK, done=st.integers(0, 9))
    def renew(self, pick, done):
        held = self.held[pick % len(self.held)]
        record, goes_on = extend(
            self.record, held.work, now_s=self.now_s, lease_s=LEASE_S, done=done
        )
        self.keep(record)
        assert goes_on == (held.work.stage == self.model.stage and self.model.state != "failed")
        if goes_on:
            held.until_s = self.now_s + LEASE_S

    @precondition(lambda self: self.held)
    @rule(pick=PICK, how=st.sampled_from(["completed", "failed", "fatal", "released", "refused"]))
    def report(self, pick, how):
        held = self.held.pop(pick % len(self.held))
        self.ended.append(held)
        self.keep(self.said(held.work, how))
        if held.work.stage != self.model.stage:
            return
        task = self.model.tasks[held.task]
        if how in ("released", "refused"):
            task.where, task.attempts, task.retry_at_s = "waits", task.attempts - 1, 0.0
            self.model.left |= how == "refused" and self.model.state == "running"
        elif how == "fatal" and held.work.stage != "discard":
            task.where, self.model.state = "waits", "failed"
        elif how in ("failed", "fatal"):
            self.strike(held.task, PAUSES_S[min(task.attempts, 3) - 1])
            if held.work.stage == "discard":
                assert self.record.problem == PROBLEM
        elif held.work.stage == "plan":
            self.model.stage, self.model.tasks, self.model.left = (
                "shard",
                [Task() for _ in self.sizes],
                False,
            )
        else:
            task.where, task.attempts, self.model.left = "done", 0, False
        self.advance()

    @precondition(lambda self: self.ended)
    @rule(
        pick=PICK,
        how=st.sampled_from(["completed", "failed", "fatal", "released", "refused", "renewed"]),
    )
    def report_too_late(self, pick, how):
        work = self.ended[pick % len(self.ended)].work
        assert self.said(work, how) == self.record

    @rule()
    def cancel(self):
        if self.model.state in ("succeeded", "failed"):
            with pytest.raises(Conflict):
                cancel(self.record, now_s=self.now_s)
            return
        self.keep(cancel(self.record, now_s=self.now_s))
        if self.model.state != "canceled" and self.model.stage != "discard":
            self.model.stage = "discard" if self.model.touched else None
            self.model.tasks = [Task()]
        self.model.state, self.model.left = "canceled", False

    @rule()
    def retry(self):
        if self.model.state not in ("failed", "canceled"):
            with pytest.raises(Conflict):
                retry(self.record, now_s=self.now_s)
            return
        self.keep(retry(self.record, now_s=self.now_s))
        self.model.left = False
        if self.model.state == "canceled":
            self.model.state = "queued"
            self.model.tasks[0].retry_at_s = 0.0
            if self.model.stage is None:
                self.anew()
            return
        self.model.state = "queued"
        for task in self.model.tasks:
            task.where = "waits" if task.where == "failed" else task.where
            task.attempts = task.attempts if task.where == "leased" else 0
            task.retry_at_s = 0.0
        self.advance()

    @invariant()
    def every_shard_is_where_the_model_has_it(self):
        assert (self.record.state, self.record.stage) == (self.model.state, self.model.stage)
        if self.model.stage is None:
            return
        waits = [*range(self.record.fresh, self.record.num_tasks), *self.record.requeued]
        leased = [
            lease.task for lease in self.record.leases.values() if lease.stage == self.record.stage
        ]
        where = dict.fromkeys(waits, "waits") | dict.fromkeys(leased, "leased")
        where |= dict.fromkeys(self.record.failed, "failed")
        assert len(where) == len(waits) + len(leased) + len(self.record.failed)
        assert [where.get(number, "done") for number in range(self.record.num_tasks)] == [
            task.where for task in self.model.tasks
        ]

    @invariant()
    def a_claim_is_worth_its_while_when_it_is_due(self):
        due_s = self.record.due_s
        if due_s is None:
            assert self.model.stage is None or self.model.state == "failed"
            return
        moments = [held.until_s for held in self.held]
        if self.model.stage != "discard" or not self.held:
            moments += [task.retry_at_s for task in self.model.tasks if task.where == "waits"]
        assert (due_s <= self.now_s) == (min(moments) <= self.now_s)

    @invariant()
    def it_is_over_when_nothing_is_left_to_be_done_and_nobody_is_at_it(self):
        ended = self.model.state in FINISHED and self.model.stage != "discard"
        if self.record.ended_s is not None:
            over = is_over(self.record, now_s=self.now_s, ended_s=self.record.ended_s)
            assert over == (ended and all(held.until_s <= self.now_s for held in self.held))
            assert not is_over(self.record, now_s=self.now_s, ended_s=self.record.ended_s - 1)
        else:
            assert not ended

    @invariant()
    def it_says_that_it_was_left(self):
        assert (self.record.refusal == MISFIT) == self.model.left
        if self.model.left:
            assert self.record.job.problem == (self.record.problem or MISFIT)

    @invariant()
    def what_is_shown_is_what_was_done(self):
        job = self.record.job
        if self.model.stage == "shard":
            done = [
                size
                for size, task in zip(self.sizes, self.model.tasks, strict=True)
                if task.where == "done"
            ]
            assert (job.shards_done, self.record.done) == (len(done), sum(done))
            assert self.record.done <= job.done <= job.images == sum(self.sizes)
        if self.model.state == "succeeded":
            expected = (sum(self.sizes), len(self.sizes), None)
            assert (job.done, job.shards_done, job.problem) == expected
        assert (job.ended_s is None) == (job.state in ("queued", "running"))
        assert (job.problem is None) or job.state in ("running", "failed") or job.stage == "discard"

    def teardown(self):
        """Whatever has happened, the job can be brought to its end."""
        if not hasattr(self, "record"):
            return
        self.now_s += 10 * LEASE_S
        for _ in range(3 * MAX_ATTEMPTS * 10):
            if self.record.state in ("failed", "canceled"):
                self.keep(retry(self.record, now_s=self.now_s))
            self.number += 1
            self.now_s += LONGEST_PAUSE_S
            record, work = lease_task(
                self.record,
                "w",
                lease=str(self.number),
                now_s=self.now_s,
                lease_s=LEASE_S,
                images_of=self.sizes.__getitem__,
            )
            self.keep(record if work is None else self.said(work, "completed", record))
            if self.record.state == "succeeded":
                return
        raise AssertionError(self.record)

    def said(self, work, how, record=None):
        record = self.record if record is None else record
        if how == "completed" and work.stage == "plan":
            return cut(record, work, self.sizes, now_s=self.now_s)
        if how == "completed":
            return complete(record, work, now_s=self.now_s, failed_items=1)
        if how == "released":
            return release_task(record, work)
        if how == "refused":
            return release_task(record, work, refusal=MISFIT)
        if how == "renewed":
            return extend(record, work, now_s=self.now_s, lease_s=LEASE_S, done=1)[0]
        return fail(record, work, PROBLEM, now_s=self.now_s, fatal=how == "fatal")

    def keep(self, record):
        self.record = record_from_json(record_to_json(record))
        assert self.record == record

    def strike(self, number, pause_s=0.0):
        task = self.model.tasks[number]
        task.retry_at_s = self.now_s + pause_s if pause_s else 0.0
        requeued = task.attempts < MAX_ATTEMPTS or self.model.stage == "discard"
        task.where = "waits" if requeued else "failed"
        self.advance()

    def advance(self):
        where = {task.where for task in self.model.tasks}
        if self.model.stage is None or where & {"waits", "leased"}:
            return
        if self.model.stage == "discard":
            if self.model.state == "queued":
                self.anew()
            else:
                self.model.stage = None
        elif "failed" in where:
            self.model.state = "failed"
        elif self.model.stage == "shard":
            self.model.stage, self.model.tasks = "publish", [Task()]
        else:
            self.model.state, self.model.stage = "succeeded", None

    def anew(self):
        self.model = Model()


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


LEASES = itertools.count()


def leased(record, now_s=0.0, images=10):
    """Returns the record after a claim, and the work."""
    return lease_task(
        record,
        "w",
        lease=str(next(LEASES)),
        now_s=now_s,
        lease_s=LEASE_S,
        images_of=lambda _: images,
    )


def with_shards(num, images=10):
    record, plan = leased(StoredJob("j", SPEC, "queued", 0.0))
    return cut(record, plan, [images] * num, now_s=10.0)


@pytest.mark.parametrize(("how", "code"), [("failed", "broken"), ("lost", "worker-lost")])
def test_a_shard_that_nobody_can_do_is_set_aside_and_a_retry_gives_out_that_one(how, code):
    record, now_s, attempts = with_shards(3), 10.0, []
    while record.state == "running":
        now_s += LONGEST_PAUSE_S
        record, work = leased(record, now_s)
        if work is not None and work.shard == 1:
            attempts.append(work.attempt)
            record = fail(record, work, PROBLEM, now_s=now_s) if how == "failed" else record
        elif work is not None:
            record = complete(record, work, now_s=now_s)
    job = record.job
    assert attempts == [*range(1, MAX_ATTEMPTS + 1)]
    assert (job.state, job.problem.code, job.shards_done, job.shards_failed) == (
        "failed", code, 2, 1
    )  # fmt: skip
    record, work = leased(retry(record, now_s=now_s), now_s)
    assert (work.shard, work.attempt, record.job.shards_failed) == (1, 1, 0)
    record, work = leased(complete(record, work, now_s=now_s), now_s)
    record = complete(record, work, now_s=now_s)
    assert (work.stage, record.state) == ("publish", "succeeded")
    for change in (cancel, retry):
        with pytest.raises(Conflict, match="succeeded"):
            change(record, now_s=now_s)


def test_a_canceled_job_that_is_retried_begins_anew():
    record, work = leased(with_shards(2), 10.0)
    record = complete(record, work, now_s=15.0)
    assert record.job.images_per_s > 0
    record, work = leased(retry(cancel(record, now_s=16.0), now_s=17.0), 18.0)
    assert work.stage == "discard"
    job = complete(record, work, now_s=19.0).job
    assert (job.state, job.stage, job.ended_s) == ("queued", "plan", None)
    assert (job.shards, job.done, job.images_per_s) == (None, 0, None)


def test_what_a_canceled_job_has_left_is_tried_for_ever():
    record, now_s, pauses = cancel(leased(with_shards(1), 10.0)[0], now_s=10.0), 10 + LEASE_S, []
    for _ in range(2000):
        record, work = leased(record, now_s)
        record = fail(record, work, PROBLEM, now_s=now_s)
        assert (record.stage, record.job.problem) == ("discard", PROBLEM)
        pauses.append(record.due_s - now_s)
        now_s = record.due_s
    assert (pauses[:4], set(pauses[4:])) == ([4.0, 16.0, 60.0, 60.0], {LONGEST_PAUSE_S})
    record, work = leased(record, now_s)
    record = complete(record, work, now_s=now_s)
    assert (record.state, record.stage, record.job.problem) == ("canceled", None, None)


def test_the_pace_leaves_out_the_time_without_workers():
    record, paces = with_shards(2, images=1000), []
    for started_s in (12.0, 5000.0):
        record, work = leased(record, started_s, images=1000)
        record = complete(record, work, now_s=started_s + 8)
        paces.append(record.job.images_per_s)
    assert paces == [125.0, 125.0]
