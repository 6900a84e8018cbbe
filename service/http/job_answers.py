"""Jobs of the queue in the form that the REST API answers."""

from datetime import UTC, datetime
from pathlib import PurePosixPath

from mlcd.label_job import OPTIONS
from mlcd.service.jobs import job as jobs
from mlcd.service.jobs.job import ERRORS
from mlcd.wire.queued_jobs import Job, JobFailure, JobProgress


def describe_job(job: jobs.Job) -> Job:
    spec = job.spec
    options = dict.fromkeys(OPTIONS) | spec.options
    return Job(
        id=job.id,
        kind=spec.kind,
        state=job.state,
        input=spec.input if spec.upload is None else PurePosixPath(spec.input).name,
        output=_show_output(spec),
        results=_results_of(job),
        fingerprint=spec.fingerprint,
        centers=spec.centers,
        **options,
        created=_to_datetime(job.created_s),
        started=None if job.started_s is None else _to_datetime(job.started_s),
        ended=None if job.ended_s is None else _to_datetime(job.ended_s),
        progress=describe_progress(job),
        problem=None if job.problem is None else describe_failure(job.problem),
    )


def _show_output(spec: jobs.JobSpec) -> str | None:
    if spec.upload is None:
        return spec.output
    return PurePosixPath(spec.output).name if spec.kind == "index" else None


def _results_of(job: jobs.Job) -> dict[str, str] | None:
    upload = job.spec.upload
    if upload is None or job.state != "succeeded":
        return None
    has_errors = bool(job.failed_items or job.damaged_files)
    return {form: id_ for form, id_ in upload.results.items() if form != ERRORS or has_errors}


def describe_progress(job: jobs.Job) -> JobProgress:
    is_index = job.spec.kind == "index"
    return JobProgress(
        shards=job.shards,
        shards_done=job.shards_done,
        shards_failed=job.shards_failed,
        images=job.images,
        done=job.done,
        failed_items=job.failed_items,
        damaged_files=job.damaged_files,
        stage=job.stage,
        collected=job.collected if is_index else None,
        indexed=job.indexed if is_index else None,
        images_per_s=job.images_per_s,
        eta_s=_estimate_eta_s(job),
    )


def describe_failure(problem: jobs.JobProblem) -> JobFailure:
    return JobFailure(code=problem.code, message=problem.message, remedy=problem.remedy)


def _estimate_eta_s(job: jobs.Job) -> float | None:
    """Returns the seconds until all images are done; None outside that stage or without a rate."""
    if job.state != "running" or job.stage != "shard" or job.images is None or not job.images_per_s:
        return None
    return max(0, job.images - job.done) / job.images_per_s


def _to_datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
