"""Wire models of batch jobs."""

from datetime import UTC, datetime
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from service.jobs import job as jobs
from service.jobs.job import JobKind, JobState

_Path = Annotated[str, Field(min_length=1, max_length=4096)]


class JobRequest(BaseModel):
    """input: a folder, a glob of tar shards or parquet files, or one file, as workers see it; output: a directory that
    does not exist yet. top, threshold, embeddings (written beside the labels): of `label` only.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"kind": "label", "input": "/data/archive/*.tar", "output": "/data/labels", "top": 8}]
        },
    )

    kind: JobKind
    input: _Path
    output: _Path
    top: Annotated[int, Field(ge=1)] | None = None
    threshold: Annotated[float, Field(ge=-1, le=1)] | None = None
    embeddings: bool | None = None


class JobFailure(BaseModel):
    """code: stable."""

    code: str
    message: str
    remedy: str | None


class JobProgress(BaseModel):
    """shards, images: null until the input has been listed. done: images, failed ones included. failed_items: images
    that errors.jsonl names. images_per_s: of all workers, while there was one. eta_s: null where it cannot be told.
    """

    shards: int | None
    shards_done: int
    shards_failed: int
    images: int | None
    done: int
    failed_items: int
    images_per_s: float | None
    eta_s: float | None

    @classmethod
    def of(cls, job: jobs.Job) -> Self:
        eta_s = None
        if job.state == "running" and job.images is not None and job.images_per_s:
            eta_s = max(0, job.images - job.done) / job.images_per_s
        return cls(
            shards=job.shards,
            shards_done=job.shards_done,
            shards_failed=job.shards_failed,
            images=job.images,
            done=job.done,
            failed_items=job.failed_items,
            images_per_s=job.images_per_s,
            eta_s=eta_s,
        )


class Job(BaseModel):
    """fingerprint, centers: of the model and the center set that it was accepted for. problem: why it has failed."""

    id: str
    kind: JobKind
    state: JobState
    input: str
    output: str
    fingerprint: str
    centers: str | None
    top: int | None
    threshold: float | None
    embeddings: bool | None
    created: datetime
    started: datetime | None
    ended: datetime | None
    progress: JobProgress
    problem: JobFailure | None

    @classmethod
    def of(cls, job: jobs.Job) -> Self:
        spec, problem = job.spec, job.problem
        labels = spec.kind == "label"
        return cls(
            id=job.id,
            kind=spec.kind,
            state=job.state,
            input=spec.input,
            output=spec.output,
            fingerprint=spec.fingerprint,
            centers=spec.centers,
            top=spec.top if labels else None,
            threshold=spec.threshold,
            embeddings=spec.embeddings if labels else None,
            created=_moment(job.created_s),
            started=None if job.started_s is None else _moment(job.started_s),
            ended=None if job.ended_s is None else _moment(job.ended_s),
            progress=JobProgress.of(job),
            problem=None
            if problem is None
            else JobFailure(code=problem.code, message=problem.message, remedy=problem.remedy),
        )


class JobList(BaseModel):
    """Newest first. cursor: of the next page, null on the last."""

    jobs: list[Job]
    cursor: str | None


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
