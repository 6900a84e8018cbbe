"""Batch jobs."""

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


# null or missing means the default of `LabelJob`
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

    input: a folder, a glob of tar shards or parquet files, or a file, at its path on the workers;
    for `curate` jobs an embeddings artifact; for all other jobs also an uploaded file.
    output: a directory that does not exist yet. Of an uploaded file it is the name of the new
    collection for `index` jobs, and null for the others, whose results are files.
    results: the formats of these files (default: parquet); csv, coco and zip (pictures by cluster)
    are for `label` jobs only. top, threshold, embeddings: for `label` jobs only; embeddings also
    writes the embeddings. url_column: for jobs on images; the input is a table with image URLs in
    this column. All other options are those of `mlcd curate`, for `curate` jobs only. An option
    that is null or missing has its default.
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
    """The reason of a failure. code: stable name."""

    code: str
    message: str
    remedy: str | None


class JobProgress(WireAnswer):
    """The progress of a job.

    shards, images: numbers in the input; null until the input has been listed. done: images
    processed, including failed ones. failed_items: images listed in errors.jsonl. damaged_files:
    input files that could not be listed completely. stage: null when nothing is left to do.
    collected, indexed: for `index` jobs only, images in the collection and in its index.
    images_per_s: rate of all workers together while any worker was active. eta_s: estimated
    seconds until all images are processed; null if unknown.
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
    """The current state of a batch job.

    input: the path, or the id of the uploaded file. output: of an uploaded file the name of the
    collection, or null. results: the ids of the files of a job on an uploaded file that has
    succeeded, by format; `errors` lists the images that could not be used, if any. fingerprint:
    fingerprint of the model that the job needs.
    centers: digest of the center set that it needs. Options that its kind does not have are null.
    problem: why the job failed; before its end, why a shard failed or why no worker runs the job.
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
    """A page of jobs, newest first. cursor: cursor of the next page, null on the last."""

    jobs: list[Job]
    cursor: str | None


class FailedShard(WireAnswer):
    """A shard that failed. images: its number of images. problem: error of the last attempt."""

    shard: int
    images: int
    problem: JobFailure


class FailureList(WireAnswer):
    """A page of failed shards, ascending. cursor: cursor of the next page, null on the last."""

    failures: list[FailedShard]
    cursor: int | None
