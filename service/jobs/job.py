"""What a job is, what of it a worker is given, and all that the queue keeps of it: plain values that travel as JSON.

A record grows with what is under way and what has failed, not with the number of shards: a shard is fresh, waits to be
given again, is leased, has failed, or else is done.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from pydantic import TypeAdapter, ValidationError

from mlcd.parts.label_job import LabelJob
from mlcd.types import Fingerprint
from service.errors import RecordDamaged

JobState = Literal["queued", "running", "succeeded", "failed", "canceled"]
Stage = Literal["plan", "shard", "publish", "discard"]
"""plan: list the input and cut it into shards. shard: make one part. publish: the manifest. discard: what a canceled
job has left."""

FINISHED: Final[frozenset[JobState]] = frozenset({"succeeded", "failed", "canceled"})
MAX_ATTEMPTS: Final = 3
"""A piece that was given out so often without an end is not given out again: it is what kills its workers."""
PAUSE_GROWTH: Final = 4.0
_BYTES: Final = range(0xDC80, 0xDD00)
"""What stands for bytes of a name that are no UTF-8."""


@dataclass(frozen=True, kw_only=True)
class JobSpec(LabelJob):
    """A job for one model. Together with the input's content it decides every byte of the output.

    input, output: absolute and checked against the allowed roots; the output does not exist yet. fingerprint: the model
    that makes it. centers: the digest of the centers whose ids the labels are; None for other kinds.
    """

    fingerprint: Fingerprint
    centers: str | None = None


@dataclass(frozen=True)
class Problem:
    """Why something failed, safe to show. code: stable, of errors.jsonl or the names of `service/http/problems.py`."""

    code: str
    message: str
    remedy: str | None = None


@dataclass(frozen=True)
class Job:
    """As it stands. Times are seconds since the epoch; shards, images: None until the input has been listed."""

    id: str
    spec: JobSpec
    state: JobState
    created_s: float
    started_s: float | None = None
    ended_s: float | None = None
    shards: int | None = None
    shards_done: int = 0
    shards_failed: int = 0
    images: int | None = None
    done: int = 0
    """Images of finished shards, and what workers have told of shards under way; failed ones included."""
    failed_items: int = 0
    """Images without a result: those that errors.jsonl names."""
    damaged_files: int = 0
    """Files of the input (tar shards, zip, parquet) that could not be listed, or not to their end: what they hold is in
    no shard. errors.jsonl names them, too."""
    stage: Stage | None = None
    """At which it is, or was when it failed; None where nothing is left to do."""
    collected: int = 0
    """Of `index`, images that the collection holds, those without a result included: once all shards are done."""
    indexed: int = 0
    """Of these, images that its index is made of: once all are collected."""
    images_per_s: float | None = None
    """Of all workers together, over the time in which there was one; None until one has told of an image."""
    problem: Problem | None = None
    """Why it has failed, or, before it has ended, why a piece has, or why a worker leaves it to others, or
    that there is none that could do it."""


@dataclass(frozen=True)
class Failure:
    """A shard that has failed for good. images: of the shard; the last of its problems."""

    shard: int
    images: int
    problem: Problem


@dataclass(frozen=True)
class FailurePage:
    """By ascending shard. cursor: of the next page, None on the last."""

    failures: list[Failure]
    cursor: int | None


@dataclass(frozen=True)
class Work:
    """A piece of a job, leased to one worker. shard: None but at the stage of that name. attempt: from 1."""

    job_id: str
    spec: JobSpec
    stage: Stage
    shard: int | None
    attempt: int
    lease: str
    """Of this claim alone: a worker whose lease has ended cannot report any more."""


@dataclass(frozen=True)
class Event:
    """A job as it stood; id: increasing within the job, what a client of SSE names as the last it has seen."""

    id: int
    job: Job


@dataclass(frozen=True)
class JobPage:
    """Newest first. cursor: of the next page, None on the last."""

    jobs: list[Job]
    cursor: str | None


@dataclass(frozen=True)
class QueueStats:
    """Jobs of each state that has any, pieces that wait to be claimed, and seconds that the oldest queued job has."""

    jobs: dict[JobState, int]
    depth: int
    oldest_wait_s: float


@dataclass(frozen=True)
class Lease:
    """One piece in the hands of one worker. images: of the shard, or `publish_steps`, else 0; done: of them, so far.

    lease_s: it never ends later than in so long, whatever clocks do.
    """

    worker: str
    stage: Stage
    piece: int
    attempt: int
    until_s: float
    images: int = 0
    done: int = 0
    lease_s: float | None = None


@dataclass(frozen=True)
class StoredJob:
    """A job in the midst of its work. `service.jobs.transitions` makes one of another.

    The work is a row of stages, each of `pieces` numbered from 0: one of every stage but `shard`.
    """

    id: str
    spec: JobSpec
    state: JobState
    created_s: float
    key: str | None = None
    """What holds the idempotency key that it was submitted with."""
    version: int = 1
    """One more with every change of what can be seen of the job: the id of its event."""
    started_s: float | None = None
    ended_s: float | None = None
    stage: Stage | None = "plan"
    """None: nothing is left to do. Of a job that has failed it is the stage that a retry goes on with."""
    pieces: int = 1
    fresh: int = 0
    """The first piece that was never given out."""
    again: tuple[int, ...] = ()
    """TaskRunner to be given out again."""
    rests: dict[int, float] = field(default_factory=dict)
    """Of those that are not given out at once: until when not, seconds since the epoch."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Of pieces that were given out and have not ended."""
    failed: tuple[int, ...] = ()
    """TaskRunner that have failed for good."""
    leases: dict[str, Lease] = field(default_factory=dict)
    """By their id. Those of an earlier stage, as a cancel leaves them, only keep `discard` waiting."""
    shards: int | None = None
    shards_done: int = 0
    images: int | None = None
    done: int = 0
    """Images of shards that are done."""
    failed_items: int = 0
    damaged_files: int = 0
    problem: Problem | None = None
    refusal: Problem | None = None
    """Why a worker has left it to others, until one of these gets on with it; or that there is none."""
    busy_since_s: float = 0.0
    """When workers would have begun with the shards, had there always been one since."""
    heard_s: float = 0.0
    """When a worker last told something."""
    images_per_s: float | None = None

    @property
    def waiting(self) -> int:
        """TaskRunner that can be given out, now or after a pause."""
        if self.stage is None or self.state == "failed":
            return 0
        if self.stage == "discard" and self.leases:
            return 0
        return self.pieces - self.fresh + len(self.again)

    @property
    def due_s(self) -> float | None:
        """From when a claim may find something here, seconds since the epoch; None: never, as it stands."""
        if self.stage is None or self.state == "failed":
            return None
        moments = [lease.until_s for lease in self.leases.values()]
        if self.waiting:
            moments += (
                [0.0]
                if self.fresh < self.pieces
                else [self.rests.get(piece, 0.0) for piece in self.again]
            )
        return min(moments, default=None)

    def next_task(self, now_s: float) -> int | None:
        """The piece whose turn it is. What has failed before waits until others had their turn."""
        if not self.waiting:
            return None
        if self.fresh < self.pieces:
            return self.fresh
        return next((piece for piece in self.again if self.rests.get(piece, 0.0) <= now_s), None)

    @property
    def images_done(self) -> int:
        """With what workers have told of shards under way."""
        return self.done + (self._under_way if self.stage == "shard" else 0)

    @property
    def _under_way(self) -> int:
        return sum(lease.done for lease in self.leases.values() if lease.stage == self.stage)

    @property
    def publish_steps(self) -> int:
        """Every image is collected and then indexed; other kinds do not count while they publish."""
        return 2 * (self.images or 0) if self.spec.kind == "index" else 0

    @property
    def _published(self) -> int:
        """Of `publish_steps`."""
        if self.state == "succeeded":
            return self.publish_steps
        return self._under_way if self.stage == "publish" else 0

    @property
    def job(self) -> Job:
        """What can be seen of it."""
        return Job(
            id=self.id,
            spec=self.spec,
            state=self.state,
            created_s=self.created_s,
            started_s=self.started_s,
            ended_s=self.ended_s,
            shards=self.shards,
            shards_done=self.shards_done,
            shards_failed=len(self.failed) if self.stage == "shard" else 0,
            images=self.images,
            done=self.images_done,
            failed_items=self.failed_items,
            damaged_files=self.damaged_files,
            problem=self.problem or self.refusal,
            stage=self.stage,
            collected=min(self._published, self.images or 0),
            indexed=max(0, self._published - (self.images or 0)),
            images_per_s=self.images_per_s,
        )


_RECORD: Final = TypeAdapter(StoredJob)
_JOB: Final = TypeAdapter(Job)
_FAILURE: Final = TypeAdapter(Failure)


def stored_job_to_json(record: StoredJob) -> bytes:
    return _RECORD.dump_json(record)


def stored_job_from_json(text: str | bytes) -> StoredJob:
    """Raises RecordDamaged where it is none."""
    try:
        return _RECORD.validate_json(text)
    except ValidationError:
        raise RecordDamaged from None


def job_to_json(job: Job) -> bytes:
    return _JOB.dump_json(job)


def job_from_json(text: str | bytes) -> Job:
    """Raises RecordDamaged where it is none."""
    try:
        return _JOB.validate_json(text)
    except ValidationError:
        raise RecordDamaged from None


def failure_to_json(failure: Failure) -> bytes:
    return _FAILURE.dump_json(failure)


def failure_from_json(text: str | bytes) -> Failure:
    """Raises RecordDamaged where it is none."""
    try:
        return _FAILURE.validate_json(text)
    except ValidationError:
        raise RecordDamaged from None


def printable(text: str) -> str:
    """One line without escapes of a terminal: what cannot be printed, or is no valid UTF-8, by its number."""
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if ord(character) in _BYTES:
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
