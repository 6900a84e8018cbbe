"""Jobs as requests ask for them: the options of each kind, and uploaded images as the input."""

import hashlib
from dataclasses import replace
from typing import Final

from mlcd.collections.item import check_name
from mlcd.label_job import OPTIONS, OPTIONS_OF, LabelJob
from mlcd.service.errors import BadRequest
from mlcd.service.jobs.files import JOB_FOLDER_PREFIX, FileStore, collections_beside, new_id
from mlcd.service.jobs.job import ERRORS, JobSpec, UploadedInput
from mlcd.service.jobs.roots import Roots
from mlcd.wire.queued_jobs import JobRequest, ResultFormat, UploadedImages

_TOKEN_CHARS: Final = 24
_LABEL_FORMATS: Final[frozenset[ResultFormat]] = frozenset({"csv", "coco", "zip"})


def read_job(body: JobRequest) -> LabelJob:
    """Returns the requested job; `place_upload` sets the paths of a job on an uploaded file.

    Raises BadRequest for an option of other kinds, or of other inputs.
    """
    fields = body.model_dump(exclude_none=True, exclude={"results"})
    kind = body.kind
    for name in OPTIONS:
        if name in fields and name not in OPTIONS_OF[kind]:
            kinds = [other_kind for other_kind, options in OPTIONS_OF.items() if name in options]
            raise BadRequest(f"{name} is an option of {' and '.join(kinds)} jobs only", param=name)
    if isinstance(body.input, UploadedImages):
        fields |= {"input": body.input.file, "output": body.output or ""}
    elif body.output is None:
        raise BadRequest("output is required where the input is a path", param="output")
    elif body.results is not None:
        raise BadRequest("results is an option of jobs on uploaded files only", param="results")
    job = LabelJob(**fields)
    if isinstance(body.input, UploadedImages):
        _check_upload(body, job)
    if kind == "curate" and job == LabelJob(kind, job.input, job.output, report=job.report):
        raise BadRequest("a curate job needs at least one step", param="duplicates")
    return job


def _check_upload(body: JobRequest, job: LabelJob) -> None:
    if body.kind not in ("label", "embed", "index"):
        raise BadRequest(
            "a job on an uploaded file must be of kind label, embed or index", param="kind"
        )
    if body.kind == "index":
        if body.output is None:
            raise BadRequest("output must be the name of the new collection", param="output")
        if body.results is not None:
            raise BadRequest(
                "an index job writes its collection alone, got results", param="results"
            )
        check_name(body.output)
    elif body.output is not None:
        raise BadRequest(
            "output must not be set for an uploaded file: its results are stored as files",
            param="output",
        )
    if job.url_column is not None:
        raise BadRequest("url_column is for inputs that are paths", param="url_column")
    if body.kind == "embed" and (unfit := sorted(_LABEL_FORMATS & {*(body.results or ())})):
        raise BadRequest(f"results of embed jobs must be parquet or jsonl, got {unfit[0]}")


def place_upload(
    files: FileStore, spec: JobSpec, body: JobRequest, owner: str | None, key: str | None
) -> JobSpec:
    """Returns the job with the paths of its input file and its output folder. The same idempotency
    `key` gives the same paths.

    Raises NotFound where the owner lacks such a file, BadRequest for one of another purpose.
    """
    file = files.find(spec.input, owner)
    if file.purpose != "images":
        raise BadRequest(
            f"the file must have the purpose images, got {file.purpose}", param="input"
        )
    token = new_id("") if key is None else hashlib.sha256(key.encode()).hexdigest()[:_TOKEN_CHARS]
    if spec.kind == "index":
        forms, output = [ERRORS], collections_beside(files.folder) / spec.output
        output.parent.mkdir(exist_ok=True)
    else:
        forms = [*(body.results or ["parquet"]), ERRORS]
        output = files.folder / f"{JOB_FOLDER_PREFIX}{token}"
    path = str(files.path(file.id))
    Roots([str(files.folder)]).check_input(path)
    return replace(
        spec,
        input=path,
        output=str(output),
        upload=UploadedInput(
            file.filename, owner, {form: f"file-{token}.{form}" for form in forms}
        ),
    )
