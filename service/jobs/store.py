"""The seam between those who ask for jobs and those who do them: one queue, embedded or in Redis."""

from collections.abc import Collection, Sequence
from typing import Protocol

from mlcd.types import Fingerprint
from service.jobs.job import (
    Census,
    Event,
    FailurePage,
    Job,
    JobPage,
    JobSpec,
    JobState,
    Problem,
    Work,
)


class JobStore(Protocol):
    """Every method is one atomic step, durable when it returns, and may be called by many processes at once.

    A piece of work is given out at least once: again where its lease has ended without a word. A piece that has been
    given out `MAX_ATTEMPTS` times without an end, or failed as often, fails for good, and the other pieces go on; when
    all have ended and some have failed, the job has failed. After each failure a piece rests, longer each time, from
    `FIRST_PAUSE_S` to `LONGEST_PAUSE_S`. Raises Unavailable where the store cannot be reached.

    A lease whose time has passed ends when the piece is given out again, and not before: a worker that slept for too
    long may go on where nobody else has it.
    """

    def submit(self, spec: JobSpec, *, key: str | None = None) -> tuple[Job, bool]:
        """The new job, True; or that which was submitted with this idempotency key before, False.

        Raises Conflict where the key is of another spec, or a job that is not finished writes to the same output.
        """
        ...

    def submitted(self, key: str) -> Job | None:
        """What was submitted with this idempotency key."""
        ...

    def get(self, job_id: str) -> Job:
        """Raises NotFound."""
        ...

    def page(
        self, *, limit: int, cursor: str | None = None, state: JobState | None = None
    ) -> JobPage:
        """Raises InvalidInput for a cursor that is none."""
        ...

    def events(self, job_id: str, after: int = 0) -> list[Event]:
        """Those with an id above `after`, oldest first; of old ones only the last few are kept. The last where the job
        has not come to `after`: an older queue was put back. Raises NotFound.
        """
        ...

    def failures(self, job_id: str, *, limit: int, after: int = -1) -> FailurePage:
        """Shards that have failed for good, with numbers above `after`. Raises NotFound."""
        ...

    def cancel(self, job_id: str) -> Job:
        """Nothing more of it is given out but `discard`, and that when nobody has a lease of it any more; workers learn
        it by `renew`. Raises NotFound, and Conflict where it has ended another way; a canceled one stays so. Of a job
        that cannot be read all that is kept is removed, and NotFound raised.
        """
        ...

    def retry(self, job_id: str) -> Job:
        """Give out again what has failed, or was canceled. Raises NotFound, and Conflict where nothing has."""
        ...

    def claim(
        self,
        worker: str,
        fingerprints: Sequence[Fingerprint],
        *,
        lease_s: float,
        leaving: Collection[str] = (),
    ) -> Work | None:
        """The next piece, of the oldest job of these models that has one; None where there is none now.

        leaving: ids of jobs that are for others.
        """
        ...

    def renew(self, work: Work, *, lease_s: float, done: int = 0) -> bool:
        """Go on for another lease; done: images of this piece so far. False: the lease or the job has ended, stop."""
        ...

    def release(self, work: Work) -> None:
        """Give the piece back unfinished, without counting the attempt: a worker drains. Also after a `renew` that said
        no: `discard` waits for it.
        """
        ...

    def refused(self, work: Work, problem: Problem) -> None:
        """As `release`, and the job tells this problem until another worker gets on with it: this one cannot do it."""
        ...

    def planned(self, work: Work, sizes: Sequence[int], *, damaged_files: int = 0) -> None:
        """The shards' images, in order; damaged_files: of the input, that could not be listed to their end. Like the
        next three, of no effect where the lease has ended.
        """
        ...

    def completed(self, work: Work, *, failed_items: int = 0) -> None:
        """The piece's output is on the disk. After the last shard `publish` is due, and then the job has succeeded."""
        ...

    def failed(self, work: Work, problem: Problem, *, fatal: bool = False) -> None:
        """An attempt has failed. fatal: whatever the shard, as with a full disk: the job fails at once."""
        ...

    def sweep(self, *, longer_than_s: float, more_than: int) -> int:
        """Forget jobs of which nothing is left to be done, with their idempotency keys: those that ended longer ago,
        and the oldest of those that are more than so many. Some at a time; returns how many. Outputs are not touched.
        """
        ...

    def pending(
        self, fingerprints: Sequence[Fingerprint], *, leaving: Collection[str] = ()
    ) -> bool:
        """Whether anything is left to be done of jobs of these models, now or later, and be it `discard`."""
        ...

    def note_served(self) -> None:
        """A job that waits, or runs, says by its problem (`no-worker`) that no worker that lives has its model, as long
        as that is so. Some jobs at a time.
        """
        ...

    def heartbeat(self, worker: str, fingerprint: Fingerprint, *, lease_s: float) -> None:
        """This worker lives and has this model, with or without work."""
        ...

    def workers(self) -> list[str]:
        """Those that live."""
        ...

    def depth(self) -> int:
        """Pieces that wait to be claimed: what a scaler looks at."""
        ...

    def census(self) -> Census: ...

    def close(self) -> None: ...
