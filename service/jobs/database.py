"""What the queue needs of a database: records that change in transactions, names, and a clock that may be set.

A name is what only one job can hold at a time: an idempotency key, and the place of its output.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self, TypeVar

from mlcd.errors import Conflict
from mlcd.types import Fingerprint
from service.errors import RecordDamaged
from service.jobs.job import (
    FINISHED,
    Event,
    Failure,
    Job,
    JobSpec,
    JobState,
    StoredJob,
    stored_job_from_json,
)
from service.timings import CLOCK_MARGIN_S, CLOCK_TOLERANCE_S, LONGEST_PAUSE_S

Result = TypeVar("Result")
KEPT_EVENTS: Final = 32
"""Of a job; each is a whole picture of it, so who has missed some has missed no more than how it came to that."""


CANDIDATES: Final = 16
"""Jobs that a claim tries: more than one only where others claim at the same moment."""
FAR: Final = 4
"""And jobs that seem to be due so late that the clock must have been set back."""


def far_s(now_s: float, lease_s: float) -> float:
    """Later than anything is put off from now."""
    return now_s + max(lease_s, LONGEST_PAUSE_S) + CLOCK_MARGIN_S


@dataclass(frozen=True)
class Listed:
    """A job in a list; None where it has just been forgotten, or its record is damaged."""

    job_id: str
    job: Job | None
    damaged: bool = False

    @classmethod
    def of(cls, job_id: str, record: str | None) -> Self:
        try:
            return cls(job_id, None if record is None else stored_job_from_json(record).job)
        except RecordDamaged:
            return cls(job_id, None, damaged=True)


@dataclass(frozen=True)
class Ended:
    """A job of which nothing is left to be done, and since when."""

    job_id: str
    ended_s: float


class Transaction(Protocol):
    """What it reads does not change until it ends; what it writes is there as a whole, or not at all."""

    @property
    def now_s(self) -> float:
        """Seconds since the epoch, by the one clock of the database; more than 0 and the same in all of it."""
        ...

    def leapt(self, *, within_s: float) -> bool:
        """Whether this clock was set, either way, in so many seconds."""
        ...

    def record(self, job_id: str) -> StoredJob | None: ...

    def newest_id(self) -> str | None:
        """The greatest of all."""
        ...

    def save(self, record: StoredJob) -> None: ...

    def remove(self, record: StoredJob) -> None:
        """With all that is kept of the job, but for the names that it holds."""
        ...

    def wipe(self, job_id: str) -> None:
        """All that is kept of a job whose record cannot be read, the names that it holds, too."""
        ...

    def publish_event(self, event: Event) -> None:
        """Keep it with the job's `KEPT_EVENTS` last."""
        ...

    def holder(self, name: str) -> str | None:
        """The job that holds a name."""
        ...

    def hold(self, name: str, job_id: str) -> None: ...

    def let_go(self, name: str) -> None: ...

    def size_of(self, job_id: str, shard: int) -> int:
        """Images of a shard, as they were set. Raises RecordDamaged where they were not."""
        ...

    def set_sizes(self, job_id: str, sizes: Sequence[int]) -> None:
        """In place of any before."""
        ...

    def set_failure(self, job_id: str, failure: Failure) -> None:
        """In place of any before of this shard."""
        ...


class JobDatabase(Protocol):
    """Raises Unavailable where the database cannot be reached or written, ArtifactInvalid where it is damaged, and
    RecordDamaged where that is true of one job alone.
    """

    def transact(self, step: Callable[[Transaction], Result]) -> Result:
        """One after the other, by all processes; durable when it returns. `step` may be run more than once: it has no
        effect but in the transaction. Nothing is kept of one that raises.
        """
        ...

    def read(self, job_id: str) -> StoredJob | None: ...

    def due(
        self, fingerprints: Sequence[Fingerprint], *, lease_s: float, exclude: Collection[str] = ()
    ) -> Sequence[str]:
        """Ids of jobs with something to claim now, oldest first, without some; a hint, as others claim too. Then some
        that are due later than anything is put off (`far_s`).
        """
        ...

    def pending(
        self, fingerprints: Sequence[Fingerprint], *, exclude: Collection[str] = ()
    ) -> bool:
        """Whether there is a job with something left to be done, now or later."""
        ...

    def page(self, *, limit: int, below: str | None, state: JobState | None) -> list[Listed]:
        """By descending id; below: ids less than this."""
        ...

    def events(self, job_id: str, after: int) -> list[Event]: ...

    def failures(self, job_id: str, shards: Sequence[int]) -> list[Failure]:
        """Of those of these shards (in ascending order) that have one."""
        ...

    def ended(self, *, longer_than_s: float, more_than: int, limit: int) -> list[Ended]:
        """Jobs of which nothing is left to be done, those that ended first: that did so longer ago, or that are more
        than so many; at most `limit`. A hint.
        """
        ...

    def count(self) -> dict[JobState, int]:
        """Jobs of each state that has any."""
        ...

    def waiting(self) -> int:
        """The sum over all records."""
        ...

    def oldest_queued_s(self) -> float:
        """Seconds that the oldest queued job has been there; 0 where none is."""
        ...

    def heartbeat(self, worker: str, fingerprint: Fingerprint, *, lease_s: float) -> None: ...

    def live_workers(self) -> dict[str, Fingerprint]:
        """Workers that live, in order, and their models."""
        ...

    def close(self) -> None: ...


def name_of_key(key: str) -> str:
    return f"key:{_digest(key)}"


def with_key(transaction: Transaction, key: str | None) -> StoredJob | None:
    """The job that was submitted with it."""
    holder = None if key is None else transaction.holder(name_of_key(key))
    return None if holder is None else transaction.record(holder)


def check_output_free(transaction: Transaction, spec: JobSpec, *, of: str | None) -> None:
    """Raises Conflict where another job than `of` holds it."""
    if (holder := transaction.holder(_name_of_output(spec))) not in (None, of):
        raise Conflict(
            f"the job {holder} writes to this output",
            remedy="wait for it, cancel it, or name another",
        )


def hold_output(transaction: Transaction, record: StoredJob) -> None:
    """Until nothing is left to be done there: of a canceled job, until that is cleared away."""
    name = _name_of_output(record.spec)
    if record.state in FINISHED and record.stage != "discard":
        let_go(transaction, name, record)
    else:
        transaction.hold(name, record.id)


def let_go(transaction: Transaction, name: str, record: StoredJob) -> None:
    """Unless another job has it by now."""
    if transaction.holder(name) == record.id:
        transaction.let_go(name)


def _name_of_output(spec: JobSpec) -> str:
    return f"output:{_digest(spec.output)}"


def _digest(text: str) -> str:
    """Names of any length and content become short ones."""
    return hashlib.sha256(text.encode()).hexdigest()


class Clock:
    """Threads may share it."""

    def __init__(self, read: Callable[[], float]) -> None:
        """read: seconds since the epoch."""
        self._read = read
        self._turn = threading.Lock()
        self._last: tuple[float, float, float] | None = None
        self._leapt_at_s: float | None = None

    def now_s(self) -> float:
        before_s = time.monotonic()
        now_s = self._read()
        after_s = time.monotonic()
        with self._turn:
            if self._last is not None:
                last_before_s, last_s, last_after_s = self._last
                shortest_s, longest_s = before_s - last_after_s, after_s - last_before_s
                if (
                    not shortest_s - CLOCK_TOLERANCE_S
                    <= now_s - last_s
                    <= longest_s + CLOCK_TOLERANCE_S
                ):
                    self._leapt_at_s = after_s
            self._last = before_s, now_s, after_s
        return now_s

    def leapt(self, *, within_s: float) -> bool:
        """Whether it was seen to be set, either way, in so many seconds of a steady clock."""
        with self._turn:
            return self._leapt_at_s is not None and time.monotonic() - self._leapt_at_s <= within_s
