"""What the queue needs of a database: records that change in transactions, names, and a few ways to find them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from mlcd.types import Fingerprint
from service.jobs.job import Event, Failure, Job, JobState
from service.jobs.record import Record

Result = TypeVar("Result")
KEPT_EVENTS: Final = 32
"""Of a job; each is a whole picture of it, so who has missed some has missed no more than how it came to that."""


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

    def record(self, job_id: str) -> Record | None: ...

    def newest_id(self) -> str | None:
        """The greatest of all."""
        ...

    def save(self, record: Record) -> None: ...

    def remove(self, record: Record) -> None:
        """With all that is kept of the job, but for the names that it holds."""
        ...

    def tell(self, event: Event) -> None:
        """Keep it with the job's `KEPT_EVENTS` last."""
        ...

    def holder(self, name: str) -> str | None:
        """The job that holds a name."""
        ...

    def hold(self, name: str, job_id: str) -> None: ...

    def let_go(self, name: str) -> None: ...

    def size_of(self, job_id: str, shard: int) -> int:
        """Images of a shard, as they were set."""
        ...

    def set_sizes(self, job_id: str, sizes: Sequence[int]) -> None:
        """In place of any before."""
        ...

    def set_failure(self, job_id: str, failure: Failure) -> None:
        """In place of any before of this shard."""
        ...


class Records(Protocol):
    """Raises Unavailable where the database cannot be reached or written, ArtifactInvalid where it is damaged."""

    def transact(self, step: Callable[[Transaction], Result]) -> Result:
        """One after the other, by all processes; durable when it returns. `step` may be run more than once: it has no
        effect but in the transaction. Nothing is kept of one that raises.
        """
        ...

    def read(self, job_id: str) -> Record | None: ...

    def due(self, fingerprints: Sequence[Fingerprint], *, leaving: Collection[str] = ()) -> Sequence[str]:
        """Ids of jobs with something to claim now, oldest first, without some; a hint, as others claim too."""
        ...

    def page(self, *, limit: int, below: str | None, state: JobState | None) -> list[Job]:
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

    def beat(self, worker: str, *, lease_s: float) -> None: ...

    def beating(self) -> list[str]: ...

    def close(self) -> None: ...
