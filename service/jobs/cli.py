"""`mlcd jobs`."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from mlcd.commands.curate_images import read_issues
from mlcd.errors import ConfigInvalid, Conflict, MlcdError
from mlcd.extras import install_command
from mlcd.label_job import JobKind
from mlcd.locations import check_no_credentials, is_url
from mlcd.progress import Reporter
from mlcd.service.jobs.job import JobState, printable
from mlcd.wire.queued_jobs import ResultFormat

if TYPE_CHECKING:  # an extra
    from mlcd.client import FailedShard, Job, JobFailure, JobProgress, Jobs, UploadedImages

_URL: Final = "http://127.0.0.1:8000"
_COLUMNS: Final = ("id", "kind", "state", "images", "img/s", "created", "input", "output")
_NOT_DONE: Final = 1
_SHOWN_FAILURES: Final = 5
_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Progress and result as JSON lines on standard output."
)


_url_option = click.option(
    "--url", help=f"Of the server; here or before the command.  [default: {_URL}]"
)


@click.group()
@_url_option
@click.option(
    "--api-key",
    envvar="MLCD_API_KEY",
    show_envvar=True,
    help="Better in the environment: all users see command lines.",
)
@click.pass_context
def jobs(context: click.Context, url: str | None, api_key: str | None) -> None:
    """Batch jobs of a server: label, embed, index or curate archives. `mlcd worker` does them."""
    context.obj = (url, api_key)


def _with_client(command: Callable[..., None]) -> Callable[..., None]:
    """Adds `--url` and passes the client of that server, else of the group's server."""

    @_url_option
    @click.pass_obj
    @wraps(command)
    def call_command(
        server: tuple[str | None, str | None], /, *args: Any, url: str | None, **kwargs: Any
    ) -> None:
        group_url, api_key = server
        with _open_jobs(url or group_url or _URL, api_key) as client:
            command(client, *args, **kwargs)

    return call_command


def _curate_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of `mlcd curate` that jobs have."""
    options = (
        click.option("--issues", metavar="NAME,NAME,…", callback=read_issues),
        click.option("--duplicates", type=click.FloatRange(0, 1, min_open=True)),
        click.option("--keep", type=click.Choice(["first", "best", "largest"])),
        click.option("--outliers", type=click.FloatRange(0, 1, min_open=True, max_open=True)),
        click.option("--balance", type=click.IntRange(1)),
        click.option("--hierarchical", type=click.IntRange(1)),
        click.option("--seed", type=click.IntRange(0, 2**32 - 1)),
        click.option(
            "--report", is_flag=True, default=None, help="Of `curate` jobs, as all of --issues on."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _read_formats(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> list[str] | None:
    """Returns the formats of `--results`."""
    del context, parameter
    if value is None:
        return None
    formats = value.split(",")
    if unknown := [form for form in formats if form not in get_args(ResultFormat)]:
        raise click.BadParameter(
            f"formats must be of {', '.join(get_args(ResultFormat))}, got {unknown[0]}"
        )
    return formats


@jobs.command()
@click.argument("images")
@click.argument("out", required=False)
@click.option("--kind", type=click.Choice(get_args(JobKind)), default="label", show_default=True)
@click.option("--top", type=click.IntRange(1), help="Labels of an image.  [default: 8]")
@click.option("--threshold", type=click.FloatRange(-1, 1), help="Only labels so similar.")
@click.option(
    "--embeddings", is_flag=True, default=None, help="Write the embeddings beside the labels."
)
@click.option("--url-column", help="IMAGES is a table: the images are at the URLs in this column.")
@_curate_options
@click.option("--key", help="Idempotency key: the same command again gives the same job.")
@click.option(
    "--results",
    metavar="FORMAT,…",
    callback=_read_formats,
    help=f"Of uploaded IMAGES: {', '.join(get_args(ResultFormat))}.  [default: parquet]",
)
@click.option("--collection", help="Of uploaded IMAGES with --kind index: the new collection.")
@click.option("--watch", "follow", is_flag=True, help="Go on as `mlcd jobs watch` does.")
@_json_option
@_with_client
def submit(
    client: "Jobs",
    images: str,
    out: str | None,
    *,
    collection: str | None,
    follow: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Have all IMAGES (a folder, a glob of tar shards or parquet files; of `curate` jobs an
    embeddings artifact) worked on, into the new directory OUT.

    Both are paths as server and workers see them, or URLs of an object store; relative paths are
    taken from the working directory here.

    Without OUT, the file IMAGES (a zip, tar or parquet file, or one image) is uploaded from here.
    With --watch the results are then downloaded to the working directory; without, by `mlcd jobs
    download`.
    """
    reporter = _reporter(as_json=as_json)
    options["issues"] = options["issues"] or None
    if out is None:
        job = client.submit(_upload(client, images), collection, **options)
    elif collection is not None:
        raise click.UsageError("--collection is for uploaded IMAGES: omit it, or omit OUT")
    else:
        job = client.submit(_place(images), _place(out), **options)
    if follow:
        _follow(client, job.id, reporter, downloads=out is None)
    else:
        reporter.result(job.model_dump(mode="json"), job.id)


@jobs.command()
@click.argument("job")
@click.argument("folder", type=click.Path(file_okay=False, exists=True), default=".")
@_with_client
def download(client: "Jobs", job: str, folder: str) -> None:
    """Download the results of JOB, whose images were uploaded, to FOLDER."""
    done = client.get(job)
    if done.results is None:
        raise Conflict(
            f"{job} must be a job on uploaded images that has succeeded, got one that has"
            f" {done.state}" + ("" if done.output is None else f" and writes to {done.output}"),
            remedy="watch it, or read its output directory",
        )
    for path in client.download(done, folder):
        click.echo(path)


def _upload(client: "Jobs", images: str) -> "UploadedImages":
    if not Path(images).is_file():
        raise click.UsageError(
            f"without OUT, IMAGES is uploaded and must be a file, got {images}: pack a folder with"
            " `tar cf images.tar FOLDER`, or name OUT for images that the server can read"
        )
    return client.upload(images)


@jobs.command("list")
@click.option("--state", type=click.Choice(get_args(JobState)))
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each.")
@_with_client
def list_jobs(client: "Jobs", state: JobState | None, *, as_json: bool) -> None:
    """All jobs, newest first."""
    jobs = client.list(state=state)
    if as_json:
        for job in jobs:
            click.echo(json.dumps(job.model_dump(mode="json")))
        return
    table = [_COLUMNS, *map(_row, jobs)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        click.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        )


@jobs.command()
@click.argument("job")
@_with_client
def show(client: "Jobs", job: str) -> None:
    """All that is known of JOB, as JSON, with the first of its shards that were left aside and how
    many more are.
    """
    shown = client.get(job)
    first = [failure.model_dump() for failure in islice(client.failures(job), _SHOWN_FAILURES)]
    more = max(0, shown.progress.shards_failed - len(first))
    click.echo(
        json.dumps(
            {**shown.model_dump(mode="json"), "failures": first, "more_failures": more}, indent=2
        )
    )


@jobs.command()
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each.")
@_with_client
def failures(client: "Jobs", job: str, *, as_json: bool) -> None:
    """Why shards of JOB were left aside, line by line."""
    for failure in client.failures(job):
        click.echo(json.dumps(failure.model_dump()) if as_json else _failure(failure))


@jobs.command()
@click.argument("job")
@_with_client
def cancel(client: "Jobs", job: str) -> None:
    """Stop JOB; what it has written is removed."""
    click.echo(f"{client.cancel(job).id} is canceled")


@jobs.command()
@click.argument("job")
@_with_client
def retry(client: "Jobs", job: str) -> None:
    """Do again what of JOB has failed; of a canceled one, everything."""
    click.echo(f"{client.retry(job).id} is queued again")


@jobs.command()
@click.argument("job")
@_json_option
@_with_client
def watch(client: "Jobs", job: str, *, as_json: bool) -> None:
    """Show the progress of JOB until it has ended. Exit status 1 where it has not succeeded."""
    _follow(client, job, _reporter(as_json=as_json))


@jobs.command("webhook-test")
@click.argument("receiver", metavar="URL")
@click.option(
    "--secret",
    envvar="MLCD_WEBHOOK_SECRET",
    show_envvar=True,
    help="Of the receiver, whsec_…, in place of that of your webhook at URL. Better in the"
    " environment: all users see command lines.",
)
@_with_client
def test_webhook(client: "Jobs", receiver: str, *, secret: str | None) -> None:
    """Have the server send an event to URL, and show the status of the answer. Exit status 1 where
    it is not 200 to 299.
    """
    status = client.test_webhook(receiver, secret=secret).status_code
    click.echo(f"the receiver answered {status}")
    if not 200 <= status < 300:
        sys.exit(_NOT_DONE)


def _place(location: str) -> str:
    """Returns a place as servers know it. Raises ConfigInvalid for a URL that they would refuse."""
    if is_url(check_no_credentials(location)):
        return location
    return os.path.abspath(location)  # noqa: PTH100 - links are the server's to follow


def _reporter(*, as_json: bool) -> Reporter:
    return Reporter("json" if as_json else "auto")


def _follow(client: "Jobs", job_id: str, reporter: Reporter, *, downloads: bool = False) -> None:
    """Shows the progress of a job. downloads: its results, too, to the working directory."""
    with closing(client.watch(job_id)) as watched:  # also where the user interrupts
        _show_until_ended(_with_problems(watched), reporter)
    for path in client.download(client.get(job_id)) if downloads else []:
        click.echo(path, err=True)


def _show_until_ended(changes: "Iterator[Job]", reporter: Reporter) -> None:
    job = next(changes)
    with reporter.stage("waiting", None):
        while job.progress.images is None and job.ended is None:
            job = next(changes)
    done = 0
    with reporter.stage(job.kind, job.progress.images) as meter:
        while True:
            progress = job.progress
            speed = round(progress.images_per_s or 0.0, 1)
            meter.advance(progress.done - done, failed=progress.failed_items, images_per_s=speed)
            done = progress.done
            if job.ended is not None or progress.stage == "publish":
                break
            job = next(changes)
    if job.kind == "index" and job.state in ("running", "succeeded"):
        job = _count("collected", lambda progress: progress.collected, job, changes, reporter)
        job = _count("indexed", lambda progress: progress.indexed, job, changes, reporter)
    if job.ended is None:
        with reporter.stage("publish", None):
            while job.ended is None:
                job = next(changes)
    reporter.result(job.model_dump(mode="json"), _outcome(job))
    if job.state != "succeeded":
        sys.exit(_NOT_DONE)


def _with_problems(changes: "Iterator[Job]") -> "Iterator[Job]":
    """Yields the changes, and shows each new problem of a job that goes on, beside its progress."""
    shown = None
    for job in changes:
        if job.ended is None and job.problem is not None and job.problem != shown:
            click.echo(f"mlcd: {_problem(job.problem)}", err=True)
        shown = job.problem
        yield job


def _count(
    step: str,
    number_of: "Callable[[JobProgress], int | None]",
    job: "Job",
    changes: "Iterator[Job]",
    reporter: Reporter,
) -> "Job":
    """Follows a number until it has come to all images, or the job to its end; returns the job as
    it is then.
    """
    done = 0
    with reporter.stage(step, job.progress.images) as meter:
        while True:
            now = number_of(job.progress) or 0
            meter.advance(max(0, now - done))  # less, where another worker begins again
            done = max(done, now)
            if job.ended is not None or now == job.progress.images:
                return job
            job = next(changes)


def _outcome(job: "Job") -> str:
    progress = job.progress
    line = f"{job.id} {job.state}: {progress.done} images,"
    line += f" {progress.failed_items} of them without a result"
    if progress.damaged_files:
        line += f", damaged files: {progress.damaged_files}"
    if progress.shards_failed:
        line += f", shards left aside: {progress.shards_failed} (mlcd jobs failures {job.id})"
    return line if job.problem is None else f"{line}; {_problem(job.problem)}"


def _failure(failure: "FailedShard") -> str:
    return f"shard {failure.shard} ({failure.images} images): {_problem(failure.problem)}"


def _problem(problem: "JobFailure") -> str:
    return printable(f"{problem.message}: {problem.remedy}" if problem.remedy else problem.message)


def _row(job: "Job") -> tuple[str, ...]:
    progress = job.progress
    images = "-" if progress.images is None else f"{progress.done}/{progress.images}"
    speed = "-" if progress.images_per_s is None else f"{progress.images_per_s:.1f}"
    return (
        job.id,
        job.kind,
        job.state,
        images,
        speed,
        _time(job.created),
        printable(job.input),
        printable(job.output or "files"),
    )


def _time(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


@contextmanager
def _open_jobs(url: str, api_key: str | None) -> "Iterator[Jobs]":
    """Opens the jobs of the server at `url`; errors name that URL."""
    try:
        from mlcd.client import Client
    except ModuleNotFoundError as error:
        raise ConfigInvalid(
            f"`mlcd jobs` needs the package {error.name}", remedy=install_command("client")
        ) from error
    with Client(url, api_key=api_key, retries=0) as client:
        try:
            yield client.jobs
        except MlcdError as error:
            if url not in str(error):
                error.message = f"{url}: {error.message}"
            raise
