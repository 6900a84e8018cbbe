"""A job, the tasks that workers lease, and all that the queue stores: plain values that travel as
JSON.

A stored job grows with the tasks that are leased or have failed, not with the number of shards. A
shard is fresh, waits for a retry, is leased, has failed, or else is done.
"""

import re
import zlib
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from mlcd.label_job import LabelJob
from mlcd.service.errors import RecordDamaged
from mlcd.types import Fingerprint
from mlcd.wire import queued_jobs as wire

JobState = wire.JobState
# plan: list the input and cut it into shards. shard: make one part. publish: write the manifest.
# discard: remove what a canceled job has written.
Stage = wire.JobStage

FINISHED: Final[frozenset[JobState]] = frozenset({"succeeded", "failed", "canceled"})
# A task that was leased so often without success is poison: it is not leased again.
MAX_ATTEMPTS: Final = 3
ERRORS: Final = "errors"  # the result that lists images without one
PAUSE_GROWTH: Final = 4.0
# Code points that stand for bytes of a file name that is not UTF-8.
_BYTES: Final = range(0xDC80, 0xDD00)
_SEAL: Final = re.compile(rb',"crc32":([0-9]+)\}\Z')
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class UploadedInput:
    """The uploaded file that a job works on. filename: as its owner called it. owner: the id of the
    API key; None without keys. results: the id of the file of each format.
    """

    filename: str
    owner: str | None
    results: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class JobSpec(LabelJob):
    """A job for one model. Together with the input's content it decides every byte of the output.

    input, output: absolute and checked against the allowed roots; the output does not exist yet.
    fingerprint: the model that makes it. centers: the digest of the centers whose ids the labels
    are; None for other kinds. upload: None for an input that clients name by its path.
    """

    fingerprint: Fingerprint
    centers: str | None = None
    upload: UploadedInput | None = None


@dataclass(frozen=True)
class JobProblem:
    """The reason of a failure, safe to show. code: stable, a reason of errors.jsonl or the name of
    an error.
    """

    code: str
    message: str
    remedy: str | None = None


@dataclass(frozen=True)
class Job:
    """A job as users see it. Times are seconds since the epoch. shards, images: None until the
    input has been listed.
    """

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
    # images of finished shards and those that workers have reported of leased ones; failed images
    # included
    done: int = 0
    failed_items: int = 0  # images without a result, which errors.jsonl names
    # Files of the input (tar, zip, parquet) that could not be listed to their end: the images after
    # that point are in no shard. errors.jsonl names them, too.
    damaged_files: int = 0
    # The stage it is at, or at which it failed; None where nothing is left to do.
    stage: Stage | None = None
    # Index jobs: images that the collection holds, those without a result included; it counts once
    # all shards are done.
    collected: int = 0
    # Index jobs: images that the index is made of; it counts once all are collected.
    indexed: int = 0
    # All workers together, over the time in which there was one; None until one has reported an
    # image.
    images_per_s: float | None = None
    owner: str | None = None  # the id of the API key that submitted it
    # The reason of its failure. Before its end: why a task has failed, why a worker leaves it to
    # others, or that there is no worker.
    problem: JobProblem | None = None


@dataclass(frozen=True)
class Failure:
    """A shard that has failed for good. images: in the shard. problem: of the last attempt."""

    shard: int
    images: int
    problem: JobProblem


@dataclass(frozen=True)
class FailurePage:
    """One page of failures, by ascending shard. cursor: of the next page, None on the last."""

    failures: list[Failure]
    cursor: int | None


@dataclass(frozen=True)
class Work:
    """A task that is leased to one worker. shard: None except at the stage `shard`. attempt: from
    1.
    """

    job_id: str
    spec: JobSpec
    stage: Stage
    shard: int | None
    attempt: int
    lease: str  # The id of this lease: a worker whose lease has ended cannot report any more.


@dataclass(frozen=True)
class Event:
    """A job after one change. id: increases within the job; a client of SSE sends it back as
    Last-Event-ID.
    """

    id: int
    job: Job


@dataclass(frozen=True)
class JobPage:
    """One page of jobs, newest first. cursor: of the next page, None on the last."""

    jobs: list[Job]
    cursor: str | None


@dataclass(frozen=True)
class QueueStats:
    """Numbers of the queue. jobs: of each state that has any. depth: tasks that wait.
    oldest_wait_s: age of the oldest queued job.
    """

    jobs: dict[JobState, int]
    depth: int
    oldest_wait_s: float


@dataclass(frozen=True)
class Lease:
    """The lease of one task by one worker. images: of the shard, or `publish_steps`, else 0. done:
    how many of them are done.

    lease_s: the lease never ends later than so many seconds from now, whatever clocks do. task:
    its number; stored as `piece`.
    """

    worker: str
    stage: Stage
    task: Annotated[int, Field(alias="piece")]
    attempt: int
    until_s: float
    images: int = 0
    done: int = 0
    lease_s: float | None = None


@dataclass(frozen=True)
class StoredJob:
    """A job as the queue stores it. `mlcd.service.jobs.transitions` makes each from the one before.

    A job is a row of stages. Each has tasks numbered from 0 (`num_tasks` of them): one at every
    stage but `shard`. A field with an alias is stored under it, as earlier versions named it.
    """

    id: str
    spec: JobSpec
    state: JobState
    created_s: float
    key: str | None = None  # the name of the idempotency key that it was submitted with
    owner: str | None = None  # the id of the API key that submitted it
    version: int = 1  # It grows by one with every visible change: the id of that event.
    started_s: float | None = None
    ended_s: float | None = None
    # None: nothing is left to do. A retry of a failed job goes on with this stage.
    stage: Stage | None = "plan"
    num_tasks: Annotated[int, Field(alias="pieces")] = 1
    fresh: int = 0  # the first task that was never leased
    # tasks to be leased again
    requeued: Annotated[tuple[int, ...], Field(alias="again")] = ()
    # The time before which each of these is not leased, seconds since the epoch; some do not wait.
    retry_at: Annotated[dict[int, float], Field(alias="rests")] = field(default_factory=dict)
    # attempts of each task that was leased and has not ended
    attempts: dict[int, int] = field(default_factory=dict)
    failed: tuple[int, ...] = ()  # tasks that have failed for good
    # Leases by id. After a cancel those of an earlier stage stay: `discard` waits for them.
    leases: dict[str, Lease] = field(default_factory=dict)
    shards: int | None = None
    shards_done: int = 0
    images: int | None = None
    done: int = 0  # images of shards that are done
    failed_items: int = 0
    damaged_files: int = 0
    problem: JobProblem | None = None
    # Why a worker has left it to others, until another gets on with it; or that there is none.
    refusal: JobProblem | None = None
    # When workers would have begun with the shards, had there always been one since.
    busy_since_s: float = 0.0
    heard_s: float = 0.0  # when a worker last reported
    images_per_s: float | None = None

    @property
    def waiting(self) -> int:
        """The number of tasks that can be leased, now or after a pause."""
        if self.stage is None or self.state == "failed":
            return 0
        if self.stage == "discard" and self.leases:
            return 0
        return self.num_tasks - self.fresh + len(self.requeued)

    @property
    def due_s(self) -> float | None:
        """The time from which a claim may find a task here, seconds since the epoch; None: never,
        as it stands.
        """
        if self.stage is None or self.state == "failed":
            return None
        moments = [lease.until_s for lease in self.leases.values()]
        if self.waiting:
            moments += (
                [0.0]
                if self.fresh < self.num_tasks
                else [self.retry_at.get(task, 0.0) for task in self.requeued]
            )
        return min(moments, default=None)

    def next_task(self, now_s: float) -> int | None:
        """Returns the task whose turn it is. A task that has failed before waits until the others
        had their turn.
        """
        if not self.waiting:
            return None
        if self.fresh < self.num_tasks:
            return self.fresh
        return next((task for task in self.requeued if self.retry_at.get(task, 0.0) <= now_s), None)

    @property
    def images_done(self) -> int:
        """The number of images done, with those that workers have reported of leased shards."""
        return self.done + (self._under_way if self.stage == "shard" else 0)

    @property
    def _under_way(self) -> int:
        return sum(lease.done for lease in self.leases.values() if lease.stage == self.stage)

    @property
    def publish_steps(self) -> int:
        """The number of steps of `publish`: an index job collects every image and then indexes it;
        other kinds do not count.
        """
        return 2 * (self.images or 0) if self.spec.kind == "index" else 0

    @property
    def _published(self) -> int:
        """The number of `publish_steps` that are done."""
        if self.state == "succeeded":
            return self.publish_steps
        return self._under_way if self.stage == "publish" else 0

    @property
    def job(self) -> Job:
        """The job as users see it."""
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
            owner=self.owner,
        )


_RECORD: Final = TypeAdapter(StoredJob)
_JOB: Final = TypeAdapter(Job)
_FAILURE: Final = TypeAdapter(Failure)


def record_to_json(record: StoredJob) -> bytes:
    return _seal(_RECORD.dump_json(record, by_alias=True))


def record_from_json(text: str | bytes) -> StoredJob:
    """Raises RecordDamaged for a text that does not hold one, or that was changed."""
    return _read_sealed(text, _RECORD)


def job_to_json(job: Job) -> bytes:
    return _seal(_JOB.dump_json(job))


def job_from_json(text: str | bytes) -> Job:
    """Raises RecordDamaged for a text that does not hold one, or that was changed."""
    return _read_sealed(text, _JOB)


def failure_to_json(failure: Failure) -> bytes:
    return _seal(_FAILURE.dump_json(failure))


def failure_from_json(text: str | bytes) -> Failure:
    """Raises RecordDamaged for a text that does not hold one, or that was changed."""
    return _read_sealed(text, _FAILURE)


def _seal(text: bytes) -> bytes:
    """Adds the CRC-32 of a JSON object to it, as its last member."""
    return b'%b,"crc32":%d}' % (text[:-1], zlib.crc32(text))


def _read_sealed(text: str | bytes, adapter: TypeAdapter[_Value]) -> _Value:
    """Reads what `_seal` returned, or an object of version 0.1.0, without a checksum."""
    stored = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    seal = _SEAL.search(stored)
    if seal is not None:
        stored = stored[: seal.start()] + b"}"
        if zlib.crc32(stored) != int(seal[1]):
            raise RecordDamaged
    try:
        return adapter.validate_json(stored)
    except ValidationError:
        raise RecordDamaged from None


def printable(text: str) -> str:
    """Returns one line without escapes of a terminal; characters that cannot be printed, or are not
    UTF-8, are written as numbers.
    """
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    if ord(character) in _BYTES:
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
