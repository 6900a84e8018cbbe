"""The queue of jobs over any database. `transitions` decides; this module reads and writes."""

import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from mlcd.artifacts.manifest import draft_path
from mlcd.errors import Conflict, InvalidInput, NotFound
from mlcd.service.errors import RecordDamaged
from mlcd.service.jobs import transitions
from mlcd.service.jobs.database import (
    Ended,
    JobDatabase,
    Listed,
    Result,
    Transaction,
    check_output_free,
    hold_output,
    let_go,
    name_of_key,
    with_key,
)
from mlcd.service.jobs.job import (
    Event,
    Failure,
    FailurePage,
    Job,
    JobPage,
    JobProblem,
    JobSpec,
    JobState,
    QueueStats,
    StoredJob,
    Work,
    printable,
)
from mlcd.types import Fingerprint

# The digits of the microseconds since the epoch, hexadecimal: ids are in the order of submission
# until the year 4253.
_ID_DIGITS: Final = 14
_RANDOM_BYTES: Final = 3
_ID_LENGTH: Final = _ID_DIGITS + 2 * _RANDOM_BYTES
_HEXADECIMAL: Final = frozenset("0123456789abcdef")
_LEASE_BYTES: Final = 8
# Most jobs that one call removes: each is a transaction, for which other callers wait.
_SWEPT: Final = 100
_LIVE_STATES: Final[tuple[JobState, ...]] = ("queued", "running")
_log = logging.getLogger("mlcd.jobs")


class Queue:
    """The queue of jobs between the servers that accept them and the workers that do them.

    Every method is one atomic step and durable when it returns. Many processes and threads may call
    it at once.

    Leases: each task is executed at least once. A task whose lease expired without a report is
    leased again. Until then the late worker keeps the task, and its report counts.

    Failures: after `MAX_ATTEMPTS` leases or failures without success a task fails for good; the
    other tasks continue. Once all tasks have ended and some failed, the job has failed. After each
    failure a task waits, from `FIRST_PAUSE_S` up to `LONGEST_PAUSE_S`.

    Raises Unavailable where the database cannot be reached.
    """

    def __init__(self, database: JobDatabase) -> None:
        self._database = database
        # ids of jobs that could not be read: they are skipped until this process restarts
        self._damaged: set[str] = set()
        # by state: the id below which the next call of `note_served` starts
        self._noted: dict[JobState, str | None] = dict.fromkeys(_LIVE_STATES)

    def submit(
        self, spec: JobSpec, *, key: str | None = None, owner: str | None = None
    ) -> tuple[Job, bool]:
        """Returns the new job and True, or the job submitted before with this idempotency key and
        False.

        owner: the id of the API key that submits it. Raises Conflict where the key belongs to
        another spec, or where an unfinished job writes to the same output.
        """

        def step(transaction: Transaction) -> tuple[Job, bool]:
            if (earlier := with_key(transaction, key)) is not None:
                if earlier.spec != spec:
                    raise Conflict(
                        "this idempotency key belongs to another job", remedy="use a new key"
                    )
                return earlier.job, False
            check_output_free(transaction, spec, of=None)
            now_s, name = transaction.now_s, None if key is None else name_of_key(key)
            record = StoredJob(
                _next_id(transaction.newest_id(), now_s), spec, "queued", now_s, name, owner
            )
            if name is not None:
                transaction.hold(name, record.id)
            return self._keep(transaction, None, record), True

        return self._database.transact(step)

    def find_submitted(self, key: str) -> Job | None:
        """Returns the job that was submitted with this idempotency key."""

        def step(transaction: Transaction) -> Job | None:
            earlier = with_key(transaction, key)
            return None if earlier is None else earlier.job

        return self._database.transact(step)

    def get(self, job_id: str) -> Job:
        """Returns the job as it stands. Raises NotFound."""
        return self._read(job_id).job

    def check_owner(self, job_id: str, owner: str) -> None:
        """Raises NotFound unless this API key submitted the job, or where that cannot be read."""
        try:
            record = self._read(job_id)
        except RecordDamaged:
            record = None
        _require(record if record is not None and record.owner == owner else None)

    def page(
        self,
        *,
        limit: int,
        cursor: str | None = None,
        state: JobState | None = None,
        owner: str | None = None,
    ) -> JobPage:
        """Returns jobs, newest first. owner: only those that this API key submitted.

        Raises InvalidInput for a cursor that is not an id.
        """
        if cursor is not None and not _is_id(cursor):
            raise InvalidInput("unknown cursor", remedy="pass `cursor` of the previous page")
        entries = list(islice(self._list(limit + 1, cursor, state, owner), limit + 1))
        for entry in entries[:limit]:
            if entry.damaged:
                self._pass_over(entry.job_id)
        jobs = [entry.job for entry in entries[:limit] if entry.job is not None]
        return JobPage(jobs, entries[limit - 1].job_id if len(entries) > limit else None)

    def _list(
        self, num: int, below: str | None, state: JobState | None, owner: str | None
    ) -> Iterator[Listed]:
        """Yields jobs, newest first. owner: only the jobs of this API key."""
        while True:
            page = self._database.page(limit=num, below=below, state=state)
            yield from (
                entry
                for entry in page
                if owner is None or (entry.job is not None and entry.job.owner == owner)
            )
            if len(page) < num:
                return
            below = page[-1].job_id

    def events(self, job_id: str, after: int = 0) -> list[Event]:
        """Returns the events with an id above `after`, oldest first; only the last few are stored.

        Raises NotFound.
        """
        events = self._database.events(job_id, after) if _is_id(job_id) else []
        if not events:
            self._read(job_id)
        return events

    def failures(self, job_id: str, *, limit: int, after: int = -1) -> FailurePage:
        """Returns the shards numbered above `after` that have failed for good. Raises NotFound."""
        record = self._read(job_id)
        shards = (
            sorted(shard for shard in record.failed if shard > after)
            if record.stage == "shard"
            else []
        )
        cursor = shards[limit - 1] if len(shards) > limit else None
        return FailurePage(self._database.failures(job_id, shards[:limit]), cursor)

    def cancel(self, job_id: str) -> Job:
        """Cancels the job for good; `renew` tells its workers.

        Only `discard` is leased after that, and only once nobody holds a lease of the job. Raises
        NotFound, and Conflict where the job has ended another way. Removes a job that cannot be
        read, and raises NotFound.
        """
        try:
            return self._change(
                job_id, lambda record, now_s: transitions.cancel(record, now_s=now_s)
            )
        except RecordDamaged:
            self._database.transact(lambda transaction: transaction.remove_with_names(job_id))
            raise NotFound(
                "the record of the job was damaged and is now deleted from the queue",
                remedy="remove its output yourself",
            ) from None

    def retry(self, job_id: str) -> Job:
        """Makes failed or canceled work available again. Raises NotFound, and Conflict where there
        is none.
        """

        def step(transaction: Transaction) -> Job:
            record = _require(transaction.record(job_id) if _is_id(job_id) else None)
            after = transitions.retry(record, now_s=transaction.now_s)
            check_output_free(transaction, record.spec, of=job_id)
            return self._keep(transaction, record, after)

        return self._database.transact(step)

    def claim(
        self,
        worker: str,
        fingerprints: Sequence[Fingerprint],
        *,
        lease_s: float,
        exclude: Collection[str] = (),
    ) -> Work | None:
        """Leases the next task of these models; None if no task is waiting.

        API keys take turns; of one key, the oldest job is first. exclude: ids of jobs to leave out.
        """
        due = self._database.due(fingerprints, lease_s=lease_s, exclude={*exclude, *self._damaged})
        for job_id in self._order_fairly(due):
            if (work := self._lease(job_id, worker, lease_s=lease_s)) is not None:
                return work
        return None

    def renew(self, work: Work, *, lease_s: float, done: int = 0) -> bool:
        """Extends the lease by lease_s from now; done: images of this task so far.

        Returns False where the lease or the job has ended: the worker must stop.
        """

        def step(transaction: Transaction) -> bool:
            if (record := transaction.record(work.job_id)) is None:
                return False
            after, goes_on = transitions.extend(
                record, work, now_s=transaction.now_s, lease_s=lease_s, done=done
            )
            self._keep(transaction, record, after)
            return goes_on

        return self._of_readable(work.job_id, step) or False

    def release(self, work: Work) -> None:
        """Returns the task unfinished and does not count the attempt, as when a worker drains.

        A worker calls it after a `renew` that returned False, too: `discard` waits for it.
        """
        self._report(work, lambda record, _: transitions.release_task(record, work))

    def refuse(self, work: Work, problem: JobProblem) -> None:
        """Releases a task that this worker cannot do; the job shows `problem` until another worker
        continues it.
        """
        self._report(
            work, lambda record, _: transitions.release_task(record, work, refusal=problem)
        )

    def finish_plan(self, work: Work, sizes: Sequence[int], *, damaged_files: int = 0) -> None:
        """Stores the number of images of each shard, in order, and starts the stage of shards.

        damaged_files: files of the input that could not be listed to their end. This method,
        `complete` and `fail` do nothing if the lease has ended.
        """

        def step(transaction: Transaction) -> bool:
            record = transaction.record(work.job_id)
            if record is not None and work.lease in record.leases:
                transaction.set_sizes(work.job_id, sizes)
                after = transitions.cut(
                    record, work, sizes, now_s=transaction.now_s, damaged_files=damaged_files
                )
                self._keep(transaction, record, after)
            return record is not None

        self._hear(work, step)

    def complete(self, work: Work, *, failed_items: int = 0) -> None:
        """Ends a task whose output is on the disk. `publish` follows the last shard, and then the
        job has succeeded.
        """
        self._report(
            work,
            lambda record, now_s: transitions.complete(
                record, work, now_s=now_s, failed_items=failed_items
            ),
        )

    def fail(self, work: Work, problem: JobProblem, *, fatal: bool = False) -> None:
        """Ends a failed attempt. fatal: all tasks would fail for the same reason, such as a full
        disk, so the job fails at once.
        """
        self._report(
            work,
            lambda record, now_s: transitions.fail(record, work, problem, now_s=now_s, fatal=fatal),
        )

    def sweep(self, *, max_age_s: float, max_jobs: int) -> int:
        """Forgets ended jobs, and their idempotency keys; returns their number.

        Forgets those that ended more than max_age_s ago, and the oldest beyond the newest max_jobs;
        at most `_SWEPT` in one call. Outputs stay.
        """
        expired = self._database.find_expired(max_age_s=max_age_s, max_jobs=max_jobs, limit=_SWEPT)
        return sum(self._forget(ended) for ended in expired if ended.job_id not in self._damaged)

    def list_ended(self) -> list[Ended]:
        """Returns all jobs with nothing left to do, those that ended first; a hint."""
        return self._database.find_expired(max_age_s=0, max_jobs=0, limit=2**31)

    def note_served(self) -> None:
        """Sets or clears the problem `no-worker` of queued and running jobs, by the models of the
        live workers.

        One call looks at `_SWEPT` jobs of each state.
        """
        models = set(self._database.live_workers().values())
        for state in _LIVE_STATES:
            entries = self._database.page(limit=_SWEPT, below=self._noted[state], state=state)
            self._noted[state] = entries[-1].job_id if len(entries) == _SWEPT else None
            for job in (entry.job for entry in entries if entry.job is not None):
                served = job.spec.fingerprint in models
                if job.problem == (
                    transitions.UNSERVED if served else None
                ):  # others cannot change by it
                    self._note(job.id, served=served)

    def pending(
        self, fingerprints: Sequence[Fingerprint], *, exclude: Collection[str] = ()
    ) -> bool:
        """Returns whether jobs of these models have tasks left, now or later; `discard` counts."""
        return self._database.pending(fingerprints, exclude={*exclude, *self._damaged})

    def heartbeat(self, worker: str, fingerprint: Fingerprint, *, lease_s: float) -> None:
        """Records that this worker is alive and has this model."""
        self._database.heartbeat(worker, fingerprint, lease_s=lease_s)

    def workers(self) -> list[str]:
        """Returns the names of the live workers."""
        return list(self._database.live_workers())

    def depth(self) -> int:
        """Returns the number of tasks that wait for a worker, for autoscalers."""
        return self._database.waiting()

    def stats(self) -> QueueStats:
        """Returns the numbers of jobs and waiting tasks."""
        return QueueStats(
            self._database.count(), self._database.waiting(), self._database.oldest_queued_s()
        )

    def close(self) -> None:
        """Closes the database."""
        self._database.close()

    def _read(self, job_id: str) -> StoredJob:
        return _require(self._database.read(job_id) if _is_id(job_id) else None)

    def _order_fairly(self, job_ids: Sequence[str]) -> list[str]:
        """Orders jobs so that the key comes first for which workers have done nothing for the
        longest time.
        """
        if len(job_ids) < 2:
            return [*job_ids]
        owner_of: dict[str, str | None] = {}
        served_s: dict[str | None, float] = {}
        for job_id in job_ids:
            try:
                record = self._database.read(job_id)
            except RecordDamaged:
                record = None  # `_lease` logs it
            owner = None if record is None else record.owner
            owner_of[job_id] = owner
            heard_s = 0.0 if record is None else record.heard_s
            served_s[owner] = max(served_s.get(owner, 0.0), heard_s)
        return sorted(job_ids, key=lambda job_id: served_s[owner_of[job_id]])

    def _lease(self, job_id: str, worker: str, *, lease_s: float) -> Work | None:
        def step(transaction: Transaction) -> Work | None:
            if (record := transaction.record(job_id)) is None:
                return None
            after, work = transitions.lease_task(
                record,
                worker,
                lease=secrets.token_hex(_LEASE_BYTES),
                now_s=transaction.now_s,
                lease_s=lease_s,
                images_of=lambda shard: transaction.size_of(job_id, shard),
                clock_jumped=transaction.has_clock_jumped(within_s=lease_s),
            )
            self._keep(transaction, record, after)
            return work

        return self._of_readable(job_id, step)

    def _of_readable(self, job_id: str, step: Callable[[Transaction], Result]) -> Result | None:
        """Runs a transaction; skips a job that cannot be read, and returns None."""
        try:
            return self._database.transact(step)
        except RecordDamaged:
            self._pass_over(job_id)
            return None

    def _pass_over(self, job_id: str) -> None:
        """Skips a job that cannot be read, and logs it the first time."""
        if job_id not in self._damaged:
            self._damaged.add(job_id)
            _log.error(
                "the record of job %s cannot be read: it is passed over; DELETE removes it", job_id
            )

    def _forget(self, ended: Ended) -> bool:
        def step(transaction: Transaction) -> bool:
            record = transaction.record(ended.job_id)
            if record is None or not transitions.is_over(
                record, now_s=transaction.now_s, ended_s=ended.ended_s
            ):
                return False
            if record.key is not None:
                let_go(transaction, record.key, record)
            transaction.remove(record)
            return True

        return self._of_readable(ended.job_id, step) or False

    def _report(self, work: Work, change: Callable[[StoredJob, float], StoredJob]) -> None:
        def step(transaction: Transaction) -> bool:
            if (record := transaction.record(work.job_id)) is None:
                return False
            self._keep(transaction, record, change(record, transaction.now_s))
            return True

        self._hear(work, step)

    def _hear(self, work: Work, step: Callable[[Transaction], bool]) -> None:
        """Runs a report of a worker; it does nothing if the job is gone or cannot be read."""
        if (
            self._of_readable(work.job_id, step) is False
        ):  # who learns it by `renew` releases the task: it is logged once
            draft = printable(str(draft_path(Path(work.spec.output))))
            message = "job %s is not in the queue any more; what it has written so far stays at %s"
            _log.warning(message, work.job_id, draft)

    def _note(self, job_id: str, *, served: bool) -> None:
        def step(transaction: Transaction) -> None:
            if (record := transaction.record(job_id)) is not None:
                after = transitions.note_served(record, served=served, now_s=transaction.now_s)
                self._keep(transaction, record, after)

        self._database.transact(step)

    def _change(self, job_id: str, change: Callable[[StoredJob, float], StoredJob]) -> Job:
        def step(transaction: Transaction) -> Job:
            record = _require(transaction.record(job_id) if _is_id(job_id) else None)
            return self._keep(transaction, record, change(record, transaction.now_s))

        return self._database.transact(step)

    @staticmethod
    def _keep(transaction: Transaction, before: StoredJob | None, after: StoredJob) -> Job:
        """Stores a job that changed, with its event, its hold on the output and its failures."""
        if after == before:
            return after.job
        if before is not None and _looks_other(before.job, after.job):
            after = replace(after, version=before.version + 1)
        transaction.save(after)
        if before is None or before.version != after.version:
            transaction.publish_event(Event(after.version, after.job))
        if before is None or (before.state, before.stage) != (after.state, after.stage):
            hold_output(transaction, after)
        if after.stage == "shard":
            _keep_failures(transaction, before, after)
        return after.job


def _looks_other(before: Job, after: Job) -> bool:
    """Returns whether the change needs an event; a new pace alone does not."""
    return replace(before, images_per_s=None) != replace(after, images_per_s=None)


def _require(record: StoredJob | None) -> StoredJob:
    if record is None:
        raise NotFound("unknown job", remedy="GET /v1/jobs lists them")
    return record


def _keep_failures(transaction: Transaction, before: StoredJob | None, after: StoredJob) -> None:
    """Stores the shards that have failed by this change; all of them failed for the same reason."""
    for shard in set(after.failed).difference(() if before is None else before.failed):
        assert after.problem is not None
        transaction.set_failure(
            after.id, Failure(shard, transaction.size_of(after.id, shard), after.problem)
        )


def _next_id(newest: str | None, now_s: float) -> str:
    """Returns an unguessable id greater than all earlier ones, even if the clock was set back."""
    moment = int(now_s * 1e6)
    if newest is not None:
        moment = max(moment, int(newest[:_ID_DIGITS], 16) + 1)
    return f"{moment:0{_ID_DIGITS}x}{secrets.token_hex(_RANDOM_BYTES)}"


def _is_id(text: str) -> bool:
    return len(text) == _ID_LENGTH and _HEXADECIMAL.issuperset(text)
