"""The transitions of a job: pure functions from a stored job and a time to the next stored job.

plan ──▶ n shards ──▶ publish ──▶ succeeded           cancel ──▶ discard ──▶ canceled
  └─ a task fails for good: failed; a retry goes on with the stage ─┘   └─ retry: plan again
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mlcd.errors import Conflict
from mlcd.service.jobs.clock import cut_back
from mlcd.service.jobs.job import (
    FINISHED,
    MAX_ATTEMPTS,
    PAUSE_GROWTH,
    JobProblem,
    Lease,
    Stage,
    StoredJob,
    Work,
)
from mlcd.service.timings import FIRST_PAUSE_S, LONGEST_PAUSE_S, WORKER_START_S

_LOST = JobProblem(
    "worker-lost",
    f"a task was leased {MAX_ATTEMPTS} times and no worker finished it",
    "the log of the workers says how they ended; then retry",
)


UNSERVED = JobProblem(
    "no-worker",
    "no worker that lives has the model that this job was submitted to",
    "start one with it: mlcd worker --model …",
)


def lease_task(
    record: StoredJob,
    worker: str,
    *,
    lease: str,
    now_s: float,
    lease_s: float,
    images_of: Callable[[int], int],
    clock_jumped: bool = False,
) -> tuple[StoredJob, Work | None]:
    """Leases a task to this worker. Returns None as work if no task can be leased now; the stored
    job may have changed even then.

    lease: an id that was never used. images_of: returns the number of images of a shard.
    clock_jumped: the clock was set recently, so an expired lease does not mean a slow worker.
    """
    record = _expire_leases(
        cut_back(record, now_s=now_s, lease_s=lease_s), now_s, counted=not clock_jumped
    )
    task = record.next_task(now_s)
    if task is None or record.stage is None:
        return record, None
    is_fresh = task == record.fresh
    attempt = record.attempts.get(task, 0) + 1
    is_shard = record.stage == "shard"
    images = (
        images_of(task) if is_shard else record.publish_steps if record.stage == "publish" else 0
    )
    idle_s = max(0.0, now_s - record.heard_s) if is_shard and not record.leases else 0.0
    leased = Lease(worker, record.stage, task, attempt, now_s + lease_s, images, lease_s=lease_s)
    record = replace(
        record,
        state=record.state if record.stage == "discard" else "running",
        refusal=None if record.refusal == UNSERVED else record.refusal,
        started_s=now_s if record.started_s is None else record.started_s,
        fresh=record.fresh + is_fresh,
        requeued=tuple(other_task for other_task in record.requeued if other_task != task),
        retry_at={
            other_task: until_s
            for other_task, until_s in record.retry_at.items()
            if other_task != task
        },
        attempts={**record.attempts, task: attempt},
        leases={**record.leases, lease: leased},
        busy_since_s=record.busy_since_s + idle_s,
        heard_s=now_s,
    )
    return record, Work(
        record.id, record.spec, leased.stage, task if is_shard else None, attempt, lease
    )


def extend(
    record: StoredJob, work: Work, *, now_s: float, lease_s: float, done: int
) -> tuple[StoredJob, bool]:
    """Extends the lease to lease_s from now; returns False if the worker must stop."""
    lease = record.leases.get(work.lease)
    if lease is None or lease.stage != record.stage or record.state == "failed":
        return record, False
    longer = replace(
        lease,
        until_s=now_s + lease_s,
        lease_s=lease_s,
        done=min(max(done, lease.done), lease.images),
    )
    return _update_pace(replace(record, leases={**record.leases, work.lease: longer}), now_s), True


def release_task(record: StoredJob, work: Work, *, refusal: JobProblem | None = None) -> StoredJob:
    """Ends a lease without counting the attempt. refusal: why such workers cannot do the task."""
    record, lease = _end_lease(record, work)
    if lease is None:
        return record
    if refusal is not None and record.state == "running":
        record = replace(record, refusal=refusal)
    return _uncount_attempt(record, lease)


def cut(
    record: StoredJob, work: Work, sizes: Sequence[int], *, now_s: float, damaged_files: int = 0
) -> StoredJob:
    """Ends the plan. sizes: images of each shard. damaged_files: files that could not be listed to
    their end.
    """
    record, lease = _end_lease(record, work)
    if lease is None:
        return record
    record = replace(
        record, shards=len(sizes), images=sum(sizes), damaged_files=damaged_files, refusal=None
    )
    record = replace(record, busy_since_s=now_s, heard_s=now_s)
    return _advance(_enter_stage(record, "shard", len(sizes)), now_s)


def complete(record: StoredJob, work: Work, *, now_s: float, failed_items: int = 0) -> StoredJob:
    record, lease = _end_lease(record, work)
    if lease is None:
        return record
    attempts = {task: attempt for task, attempt in record.attempts.items() if task != lease.task}
    record = replace(record, attempts=attempts, refusal=None)
    if lease.stage == "shard":
        record = replace(
            record,
            shards_done=record.shards_done + 1,
            done=record.done + lease.images,
            failed_items=record.failed_items + min(failed_items, lease.images),
        )
        record = _update_pace(record, now_s)
    return _advance(record, now_s)


def fail(
    record: StoredJob, work: Work, problem: JobProblem, *, now_s: float, fatal: bool = False
) -> StoredJob:
    record, lease = _end_lease(record, work)
    if lease is None:
        return record
    if fatal and lease.stage != "discard":
        record = replace(record, requeued=(*record.requeued, lease.task))
        return (
            record
            if record.state == "failed"
            else replace(record, state="failed", ended_s=now_s, problem=problem)
        )
    if lease.stage == "discard":
        record = replace(record, problem=problem)
    growth = PAUSE_GROWTH ** min(lease.attempt - 1, MAX_ATTEMPTS)  # far enough for the longest
    pause_s = min(FIRST_PAUSE_S * growth, LONGEST_PAUSE_S)
    return _advance(_count_failure(record, lease, problem, retry_at_s=now_s + pause_s), now_s)


def cancel(record: StoredJob, *, now_s: float) -> StoredJob:
    """Cancels a job. Raises Conflict if it has succeeded or failed."""
    if record.state == "canceled":
        return record
    if record.state in FINISHED:
        raise Conflict(f"a job to cancel must be queued or running, got {record.state}")
    record = replace(record, state="canceled", ended_s=now_s, refusal=None)
    if record.stage == "discard":  # a retry had not got further
        return record
    untouched = record.stage == "plan" and not record.fresh
    return replace(record, stage=None) if untouched else _enter_stage(record, "discard", 1)


def retry(record: StoredJob, *, now_s: float) -> StoredJob:
    """Starts failed or canceled work again. Raises Conflict if nothing failed or was canceled."""
    if record.state not in ("failed", "canceled"):
        raise Conflict(f"a job to retry must be failed or canceled, got {record.state}")
    was_canceled = record.state == "canceled"
    record = replace(record, state="queued", ended_s=None, problem=None, refusal=None)
    if was_canceled:
        return replace(record, retry_at={}) if record.stage == "discard" else _restart(record)
    leased = {lease.task for lease in record.leases.values()}
    attempts = {task: attempt for task, attempt in record.attempts.items() if task in leased}
    record = replace(
        record,
        requeued=(*record.requeued, *record.failed),
        retry_at={},
        failed=(),
        attempts=attempts,
    )
    return _advance(record, now_s)


def note_served(record: StoredJob, *, served: bool, now_s: float) -> StoredJob:
    """Sets or clears the refusal `no-worker`; a refusal by a worker takes precedence."""
    if served and record.refusal == UNSERVED:
        return replace(record, refusal=None)
    is_new = now_s - record.created_s < WORKER_START_S
    if not served and not is_new and record.refusal is None and record.state not in FINISHED:
        return replace(record, refusal=UNSERVED)
    return record


def is_over(record: StoredJob, *, now_s: float, ended_s: float) -> bool:
    """Returns whether a job may be removed: it ended at `ended_s`, without tasks or leases."""
    if record.state not in FINISHED or record.stage == "discard" or record.ended_s != ended_s:
        return False
    return all(lease.until_s <= now_s for lease in record.leases.values())


def _expire_leases(record: StoredJob, now_s: float, *, counted: bool) -> StoredJob:
    """Ends expired leases."""
    for name, lease in record.leases.items():
        if lease.until_s <= now_s:
            leases = {
                other_name: other_lease
                for other_name, other_lease in record.leases.items()
                if other_name != name
            }
            record = replace(record, leases=leases)
            if lease.stage == record.stage and counted:
                record = _count_failure(
                    record, lease, _LOST, retry_at_s=None
                )  # the lease was pause enough
            elif lease.stage == record.stage:
                record = _uncount_attempt(record, lease)
    return _advance(record, now_s)


def _end_lease(record: StoredJob, work: Work) -> tuple[StoredJob, Lease | None]:
    """Removes a lease. Returns None, so that the report is ignored, for an unknown lease or one of
    an earlier stage.
    """
    lease = record.leases.get(work.lease)
    if lease is None:
        return record, None
    leases = {
        name: other_lease for name, other_lease in record.leases.items() if name != work.lease
    }
    return replace(record, leases=leases), lease if lease.stage == record.stage else None


def _count_failure(
    record: StoredJob, lease: Lease, problem: JobProblem, *, retry_at_s: float | None
) -> StoredJob:
    """Counts a failed attempt. Removing a canceled job's output is retried without limit."""
    if lease.attempt < MAX_ATTEMPTS or lease.stage == "discard":
        retry_at = (
            record.retry_at if retry_at_s is None else {**record.retry_at, lease.task: retry_at_s}
        )
        return replace(record, requeued=(*record.requeued, lease.task), retry_at=retry_at)
    return replace(record, failed=(*record.failed, lease.task), problem=problem)


def _uncount_attempt(record: StoredJob, lease: Lease) -> StoredJob:
    attempts = {**record.attempts, lease.task: lease.attempt - 1}
    return replace(record, requeued=(lease.task, *record.requeued), attempts=attempts)


def _advance(record: StoredJob, now_s: float) -> StoredJob:
    """Enters the next stage, or ends the job, once the tasks of this stage are done."""
    if record.stage is None or record.fresh < record.num_tasks or record.requeued:
        return record
    if any(lease.stage == record.stage for lease in record.leases.values()):
        return record
    if record.stage == "discard":
        return (
            _restart(record)
            if record.state == "queued"
            else replace(record, stage=None, problem=None)
        )
    if record.failed:
        return replace(record, state="failed", ended_s=now_s)
    if record.stage == "shard":
        return _enter_stage(record, "publish", 1)
    return replace(record, state="succeeded", stage=None, ended_s=now_s)


def _enter_stage(record: StoredJob, stage: Stage, num_tasks: int) -> StoredJob:
    return replace(
        record,
        stage=stage,
        num_tasks=num_tasks,
        fresh=0,
        requeued=(),
        retry_at={},
        attempts={},
        failed=(),
    )


def _restart(record: StoredJob) -> StoredJob:
    """Starts over with the plan."""
    record = replace(record, started_s=None, problem=None, images_per_s=None)
    record = replace(
        record, shards=None, shards_done=0, images=None, done=0, failed_items=0, damaged_files=0
    )
    return _enter_stage(record, "plan", 1)


def _update_pace(record: StoredJob, now_s: float) -> StoredJob:
    if record.stage != "shard":
        return replace(record, heard_s=now_s)
    busy_s, done = now_s - record.busy_since_s, record.images_done
    return replace(
        record,
        heard_s=now_s,
        images_per_s=done / busy_s if done and busy_s > 0 else record.images_per_s,
    )
