"""Wire models of batch jobs."""

from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, create_model

from mlcd.parts.label_job import OPTIONS, JobKind, LabelJob
from service.errors import BadRequest
from service.jobs import job as jobs
from service.jobs.job import JobState, Stage

_Path = Annotated[str, Field(min_length=1, max_length=4096)]
# An option that is null or missing has the default of `LabelJob`.
_OPTIONAL: Any = {name: (option | None, None) for name, option in OPTIONS.items()}

JobRequest = create_model(
    "JobRequest",
    __config__=ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {
                    "kind": "label",
                    "input": "/data/archive/*.tar",
                    "output": "/data/labels",
                    "top": 8,
                }
            ]
        },
    ),
    __doc__="""input: a folder, a glob of tar shards or parquet files, or one file, as workers see
    it; output: a directory that does not exist yet. top, threshold, embeddings (written beside the
    labels): of `label` only.
    """,
    kind=(JobKind, ...),
    input=(_Path, ...),
    output=(_Path, ...),
    **_OPTIONAL,
)


def requested_job(request: BaseModel) -> LabelJob:
    """Returns the job that a `JobRequest` asks for. Raises BadRequest for an option that its kind
    does not have.
    """
    given = request.model_dump(exclude_none=True)
    for name in OPTIONS:
        if name in given and given["kind"] != "label":
            raise BadRequest(f"{name} is of label jobs only", param=name)
    return LabelJob(**given)


class JobFailure(BaseModel):
    """code: stable."""

    code: str
    message: str
    remedy: str | None

    @classmethod
    def of(cls, problem: jobs.Problem) -> Self:
        return cls(code=problem.code, message=problem.message, remedy=problem.remedy)


class JobProgress(BaseModel):
    """shards, images: null until the input has been listed. done: images, failed ones included.
    failed_items: images that errors.jsonl names. damaged_files: archives of the input that could
    not be listed to their end. stage: null when nothing is left to do. collected, indexed: of
    `index` alone, images in the collection, and of those in its index, when all are done.
    images_per_s: of all workers, while there was one. eta_s: until all images are done; null where
    it cannot be told, and after that.
    """

    shards: int | None
    shards_done: int
    shards_failed: int
    images: int | None
    done: int
    failed_items: int
    damaged_files: int
    stage: Stage | None
    collected: int | None
    indexed: int | None
    images_per_s: float | None
    eta_s: float | None

    @classmethod
    def of(cls, job: jobs.Job) -> Self:
        eta_s = None
        if (
            job.state == "running"
            and job.stage == "shard"
            and job.images is not None
            and job.images_per_s
        ):
            eta_s = max(0, job.images - job.done) / job.images_per_s
        return cls(
            shards=job.shards,
            shards_done=job.shards_done,
            shards_failed=job.shards_failed,
            images=job.images,
            done=job.done,
            failed_items=job.failed_items,
            damaged_files=job.damaged_files,
            stage=job.stage,
            collected=job.collected if job.spec.kind == "index" else None,
            indexed=job.indexed if job.spec.kind == "index" else None,
            images_per_s=job.images_per_s,
            eta_s=eta_s,
        )


class Job(BaseModel):
    """fingerprint, centers: of the model and the center set that it was accepted for. problem: why
    it has failed; before it has ended, why a shard has, why a worker has left it to others, or that
    there is none that could do it.
    """

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
        options = spec.options if spec.kind == "label" else dict.fromkeys(OPTIONS)
        return cls(
            id=job.id,
            kind=spec.kind,
            state=job.state,
            input=spec.input,
            output=spec.output,
            fingerprint=spec.fingerprint,
            centers=spec.centers,
            **options,
            created=_moment(job.created_s),
            started=None if job.started_s is None else _moment(job.started_s),
            ended=None if job.ended_s is None else _moment(job.ended_s),
            progress=JobProgress.of(job),
            problem=None if problem is None else JobFailure.of(problem),
        )


class JobList(BaseModel):
    """Newest first. cursor: of the next page, null on the last."""

    jobs: list[Job]
    cursor: str | None


class FailedShard(BaseModel):
    """A shard that was left aside. images: in it; problem: of the last attempt."""

    shard: int
    images: int
    problem: JobFailure

    @classmethod
    def of(cls, failure: jobs.Failure) -> Self:
        return cls(
            shard=failure.shard, images=failure.images, problem=JobFailure.of(failure.problem)
        )


class FailureList(BaseModel):
    """A page of failures by ascending shard. cursor: the next page's, null on the last."""

    failures: list[FailedShard]
    cursor: int | None


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
