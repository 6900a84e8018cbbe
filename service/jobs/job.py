"""What a job is, and what of it a worker is given: plain values that travel as JSON."""

from dataclasses import dataclass
from typing import Final, Literal

from mlcd.types import Fingerprint

JobKind = Literal["label", "embed", "index"]
JobState = Literal["queued", "running", "succeeded", "failed", "canceled"]
Stage = Literal["plan", "shard", "publish", "discard"]
"""plan: list the input and cut it into shards. shard: make one part. publish: the manifest. discard: what a canceled
job has left."""

FINISHED: Final[frozenset[JobState]] = frozenset({"succeeded", "failed", "canceled"})
MAX_ATTEMPTS: Final = 3
"""A piece that was given out so often without an end is not given out again: it is what kills its workers."""
FIRST_PAUSE_S: Final = 4.0
"""After the first failure of a piece, before it is given out again: what passes by itself is over then."""
PAUSE_GROWTH: Final = 4.0
LONGEST_PAUSE_S: Final = 60.0


@dataclass(frozen=True)
class JobSpec:
    """What is asked for. Together with the input's content it decides every byte of the output.

    input: a folder, a glob of tar shards, a parquet file; output: a directory that does not exist yet. Both are
    absolute and were checked against the allowed roots. fingerprint: of the model that makes it; centers: digest of
    those whose ids the labels are. embeddings: `label` writes them too.
    """

    kind: JobKind
    input: str
    output: str
    fingerprint: Fingerprint
    centers: str | None = None
    top: int = 8
    threshold: float | None = None
    embeddings: bool = False


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
class Census:
    """Jobs of each state that has any, pieces that wait to be claimed, and seconds that the oldest queued job has."""

    jobs: dict[JobState, int]
    depth: int
    oldest_wait_s: float
