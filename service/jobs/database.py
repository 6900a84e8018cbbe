"""The database behind the queue: stored jobs that change in transactions, names, and one clock.

A name is held by one job at a time. It is an idempotency key, or the path of an output.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self, TypeVar

from mlcd.errors import Conflict
from mlcd.service.errors import RecordDamaged
from mlcd.service.jobs.job import (
    FINISHED,
    Event,
    Failure,
    Job,
    JobSpec,
    JobState,
    StoredJob,
    record_from_json,
)
from mlcd.types import Fingerprint

Result = TypeVar("Result")
# Events kept for each job. Each contains the whole job, so a client that misses events misses only
# intermediate steps.
KEPT_EVENTS: Final = 32
# Jobs that one claim tries: more than one are needed if workers claim at the same time.
CANDIDATES: Final = 16


@dataclass(frozen=True)
class Listed:
    """One job of a list. job: None if it was removed in the meantime, or is damaged."""

    job_id: str
    job: Job | None
    damaged: bool = False

    @classmethod
    def of(cls, job_id: str, record: str | bytes | None) -> Self:
        try:
            return cls(job_id, None if record is None else record_from_json(record).job)
        except RecordDamaged:
            return cls(job_id, None, damaged=True)


@dataclass(frozen=True)
class Ended:
    """A job with nothing left to do. ended_s: the time of its end."""

    job_id: str
    ended_s: float


class Transaction(Protocol):
    """One transaction: what it reads does not change until it ends, and its writes take effect
    together or not at all.
    """

    @property
    def now_s(self) -> float:
        """Seconds since the epoch by the database's one clock: more than 0, and the same in the
        whole transaction.
        """
        ...

    def has_clock_jumped(self, *, within_s: float) -> bool:
        """Returns whether this clock was set, forward or back, in the last within_s seconds."""
        ...

    def record(self, job_id: str) -> StoredJob | None: ...

    def newest_id(self) -> str | None:
        """Returns the greatest id of all jobs."""
        ...

    def save(self, record: StoredJob) -> None: ...

    def remove(self, record: StoredJob) -> None:
        """Removes a job and all that is stored with it, except the names that it holds."""
        ...

    def remove_with_names(self, job_id: str) -> None:
        """Removes all that is stored of a job that cannot be read, with the names that it holds."""
        ...

    def publish_event(self, event: Event) -> None:
        """Stores an event; of each job the last `KEPT_EVENTS` stay."""
        ...

    def holder(self, name: str) -> str | None:
        """Returns the id of the job that holds a name."""
        ...

    def hold(self, name: str, job_id: str) -> None: ...

    def let_go(self, name: str) -> None: ...

    def size_of(self, job_id: str, shard: int) -> int:
        """Returns the number of images of a shard. Raises RecordDamaged where it was never set."""
        ...

    def set_sizes(self, job_id: str, sizes: Sequence[int]) -> None:
        """Replaces the sizes of all shards."""
        ...

    def set_failure(self, job_id: str, failure: Failure) -> None:
        """Replaces the failure of this shard."""
        ...


class JobDatabase(Protocol):
    """All that a queue stores.

    Raises Unavailable where the database cannot be reached or written, ArtifactInvalid where it is
    damaged, and RecordDamaged where one job alone is damaged.
    """

    def transact(self, step: Callable[[Transaction], Result]) -> Result:
        """Runs a transaction; those of all processes run one after the other.

        It is durable when this returns. `step` may run more than once and must be free of other
        effect. Nothing is stored where it raises.
        """
        ...

    def read(self, job_id: str) -> StoredJob | None: ...

    def due(
        self, fingerprints: Sequence[Fingerprint], *, lease_s: float, exclude: Collection[str] = ()
    ) -> Sequence[str]:
        """Returns ids of jobs with a task to lease now, oldest first, then up to MAX_LATE_DUE jobs
        with a task due implausibly late (after `latest_due_s`).

        exclude: ids to leave out. The answer is a hint, as other workers lease at the same time.
        """
        ...

    def pending(
        self, fingerprints: Sequence[Fingerprint], *, exclude: Collection[str] = ()
    ) -> bool:
        """Returns whether a job has tasks left, now or later."""
        ...

    def page(self, *, limit: int, below: str | None, state: JobState | None) -> list[Listed]:
        """Returns a page by descending id. below: only ids less than this one."""
        ...

    def events(self, job_id: str, after: int) -> list[Event]: ...

    def failures(self, job_id: str, shards: Sequence[int]) -> list[Failure]:
        """Returns the failures of these shards, given in ascending order; some may have none."""
        ...

    def find_expired(self, *, max_age_s: float, max_jobs: int, limit: int) -> list[Ended]:
        """Returns ended jobs to remove, oldest end first, at most `limit`: those that ended more
        than max_age_s ago, and the oldest beyond the newest max_jobs. The answer is a hint.
        """
        ...

    def count(self) -> dict[JobState, int]:
        """Returns the number of jobs of each state that has any."""
        ...

    def waiting(self) -> int:
        """Returns the number of tasks that wait, over all jobs."""
        ...

    def oldest_queued_s(self) -> float:
        """Returns the age in seconds of the oldest queued job; 0 where there is none."""
        ...

    def heartbeat(self, worker: str, fingerprint: Fingerprint, *, lease_s: float) -> None: ...

    def live_workers(self) -> dict[str, Fingerprint]:
        """Returns the live workers by name, with their models."""
        ...

    def close(self) -> None: ...


def name_of_key(key: str) -> str:
    return f"key:{_digest(key)}"


def with_key(transaction: Transaction, key: str | None) -> StoredJob | None:
    """Returns the job that was submitted with this idempotency key."""
    holder = None if key is None else transaction.holder(name_of_key(key))
    return None if holder is None else transaction.record(holder)


def check_output_free(transaction: Transaction, spec: JobSpec, *, of: str | None) -> None:
    """Raises Conflict if a job other than `of` holds the output."""
    if (holder := transaction.holder(_name_of_output(spec))) not in (None, of):
        raise Conflict(
            f"the job {holder} writes to this output",
            remedy="wait for it, cancel it, or name another",
        )


def hold_output(transaction: Transaction, record: StoredJob) -> None:
    """Holds the output while the job has work there; a canceled job holds it until its output is
    removed.
    """
    name = _name_of_output(record.spec)
    if record.state in FINISHED and record.stage != "discard":
        let_go(transaction, name, record)
    else:
        transaction.hold(name, record.id)


def let_go(transaction: Transaction, name: str, record: StoredJob) -> None:
    """Releases a name, unless another job has taken it since."""
    if transaction.holder(name) == record.id:
        transaction.let_go(name)


def _name_of_output(spec: JobSpec) -> str:
    return f"output:{_digest(spec.output)}"


def _digest(text: str) -> str:
    """Returns a short name for a text of any length."""
    return hashlib.sha256(text.encode()).hexdigest()
