"""The batch jobs."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, SkipValidation, create_model

from mlcd.label_job import OPTIONS, JobKind
from mlcd.types import Issue
from mlcd.wire.shapes import WireAnswer, WireRequest, read_whole

JobState = Literal["queued", "running", "succeeded", "failed", "canceled"]


JobStage = Literal["plan", "shard", "publish", "discard"]


ResultFormat = Literal["parquet", "csv", "jsonl", "coco", "zip"]


_Path = Annotated[str, Field(min_length=1, max_length=4096)]


# An option that is null or missing has the default of `LabelJob`.
_OPTIONS: Any = {
    name: (Annotated[kind | None, BeforeValidator(read_whole)], None)
    for name, kind in OPTIONS.items()
}


_JobOptions: Any = create_model("_JobOptions", __base__=WireRequest, **_OPTIONS)


class UploadedImages(WireRequest):
    """An uploaded file of the purpose `images`. file: its id."""

    file: Annotated[str, Field(min_length=1, max_length=255)]


class JobRequest(_JobOptions):
    """A request for a job.

    input: a folder, a glob of tar shards or parquet files, or one file, as workers see it; of
    `curate` jobs an embeddings artifact; of `label` and `embed` jobs also an uploaded file. output:
    a directory that does not exist yet; of a job on an uploaded file null, as its results are files
    again. results: the formats of these files, by default parquet; csv, coco and zip (pictures by
    cluster) are those of `label` jobs only. top,
    threshold, embeddings (written beside the labels): options of `label` jobs only. url_column: of
    jobs of images; the input is a table with their URLs in this column. The others are those of
    `curate` jobs only, as the command has them. One that is null or missing has its default.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "kind": "label",
                    "input": "/data/archive/*.tar",
                    "output": "/data/labels",
                    "top": 8,
                }
            ]
        }
    )

    kind: JobKind
    input: _Path | UploadedImages
    output: _Path | None = None
    results: Annotated[list[ResultFormat], Field(min_length=1)] | None = None


class JobFailure(WireAnswer):
    """The reason of a failure. code: stable."""

    code: str
    message: str
    remedy: str | None


class JobProgress(WireAnswer):
    """The progress of a job.

    shards, images: null until the input has been listed. done: images, failed ones included.
    failed_items: images that errors.jsonl names. damaged_files: files of the input that could not
    be listed to their end. stage: null when nothing is left to do. collected, indexed: of `index`
    jobs only, images in the collection and in its index. images_per_s: of all workers together,
    over the time in which there was one. eta_s: seconds until all images are done, where known.
    """

    shards: int | None
    shards_done: int
    shards_failed: int
    images: int | None
    done: int
    failed_items: int
    damaged_files: int
    stage: SkipValidation[JobStage] | None
    collected: int | None
    indexed: int | None
    images_per_s: float | None
    eta_s: float | None


class Job(WireAnswer):
    """A batch job as it stands.

    input: the path, or the id of the uploaded file. output: null for a job on an uploaded file.
    results: of such a job that has succeeded, the ids of its files by format; `errors` lists the
    images that could not be used, where there are some. fingerprint, centers: those of the model
    and the center set that it was accepted for. Options
    that its kind does not have are null. problem: why the job has failed;
    before its end, why a shard has failed or why no worker does it.
    """

    id: str
    kind: SkipValidation[JobKind]
    state: SkipValidation[JobState]
    input: str
    output: str | None
    results: dict[str, str] | None
    fingerprint: str
    centers: str | None
    top: int | None
    threshold: float | None
    embeddings: bool | None
    url_column: str | None
    issues: list[Issue] | None
    duplicates: float | None
    keep: str | None
    outliers: float | None
    balance: int | None
    hierarchical: int | None
    seed: int | None
    report: bool | None
    created: datetime
    started: datetime | None
    ended: datetime | None
    progress: JobProgress
    problem: JobFailure | None


class JobList(WireAnswer):
    """A page of jobs, newest first. cursor: of the next page, null on the last."""

    jobs: list[Job]
    cursor: str | None


class FailedShard(WireAnswer):
    """A shard that was left aside. images: in it. problem: that of the last attempt."""

    shard: int
    images: int
    problem: JobFailure


class FailureList(WireAnswer):
    """A page of failures by ascending shard. cursor: the next page's, null on the last."""

    failures: list[FailedShard]
    cursor: int | None
