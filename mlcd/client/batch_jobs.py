"""Batch jobs of a server: `Client.jobs` and `AsyncClient.jobs`."""

import asyncio
import builtins
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, TypeVar, Unpack

import httpx

from mlcd.client.connection import Connection, encode_name
from mlcd.client.loop_thread import LoopThread
from mlcd.client.reading import (
    read_failures,
    read_file,
    read_job,
    read_jobs,
    read_part,
    read_upload,
    read_webhook,
    read_webhook_test,
    read_webhooks,
)
from mlcd.client.refusals import Refused, not_our_api
from mlcd.errors import InvalidInput, Unavailable
from mlcd.label_job import JobKind, JobOptions
from mlcd.wire.queued_jobs import FailedShard, Job, JobState, ResultFormat, UploadedImages
from mlcd.wire.webhooks import WebhookTestResult

_ROUTE: Final = "/v1/jobs"
_FILES: Final = "/v1/files"
_UPLOADS: Final = "/v1/uploads"
_WEBHOOKS: Final = "/v1/webhook_endpoints"
_MAX_WEBHOOKS: Final = 100  # the server's limit per API key
_PART_BYTES: Final = 2**24  # small enough to upload within the deadline of one request
_PAGE_SIZE: Final = 200  # the server's limit
_KEY: Final = re.compile(r"[!-~]{1,255}")  # idempotency keys that fit a header
# Read timeout of a stream; the server sends keep-alives more often.
_SILENCE_S: Final = 60.0
_PAUSE_S: Final = 1.0  # before reconnecting to the stream of events
# Consecutive failed streams without an event before giving up.
_MAX_EMPTY_STREAMS: Final = 60
_MAX_EMPTY_STREAMS_BEFORE_FIRST_ANSWER: Final = 2  # if the server has never answered
_Value = TypeVar("_Value")
_Cursor = TypeVar("_Cursor", str, int)


async def _read_pages(
    connection: Connection,
    path: str,
    read: Callable[[httpx.Response], tuple[list[_Value], _Cursor | None]],
    filters: dict[str, str],
) -> AsyncGenerator[_Value, None]:
    """Yields the entries of all pages; requests each page when the previous one is consumed."""
    cursor: _Cursor | None = None
    while True:
        params: dict[str, Any] = {
            "limit": _PAGE_SIZE,
            **filters,
            **({} if cursor is None else {"cursor": cursor}),
        }
        values, cursor = read(await connection.ask("GET", path, params=params))
        for value in values:
            yield value
        if cursor is None:
            return


class AsyncJobs:
    """The methods of `Jobs`, with await and `async for`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def upload(self, path: str | Path) -> UploadedImages:
        path = Path(path)
        fields = {"filename": path.name, "purpose": "images", "bytes": path.stat().st_size}
        upload = read_upload(await self._connection.ask("POST", _UPLOADS, json=fields))
        route = f"{_UPLOADS}/{encode_name(upload.id)}"
        part_ids = [
            read_part(await self._connection.ask("POST", f"{route}/parts", part=part)).id
            for part in _read_parts(path)
        ]
        completed = read_upload(
            await self._connection.ask("POST", f"{route}/complete", json={"part_ids": part_ids})
        )
        if completed.file is None:
            raise not_our_api()
        return UploadedImages(file=completed.file.id)

    async def download(self, job: Job, folder: str | Path = ".") -> builtins.list[Path]:
        paths = []
        for file_id in (job.results or {}).values():
            route = f"{_FILES}/{encode_name(file_id)}"
            file = read_file(await self._connection.ask("GET", route))
            path = Path(folder) / PurePosixPath(file.filename.replace("\\", "/")).name
            with _open_replacement(path) as out:
                await self._connection.download(f"{route}/content", out)
            paths.append(path)
        return paths

    async def submit(
        self,
        input: str | UploadedImages,  # noqa: A002 - named like the request's field
        output: str | None = None,
        *,
        kind: JobKind = "label",
        results: Sequence[ResultFormat] | None = None,
        key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        if key is not None and not _KEY.fullmatch(key):
            raise InvalidInput(
                "the idempotency key must be 1 to 255 printable ASCII characters without spaces",
                remedy="give another key",
            )
        fields = {
            "kind": kind,
            "input": input if isinstance(input, str) else input.model_dump(),
            "output": output,
            "results": None if results is None else [*results],
            **options,
        }
        response = await self._connection.ask(
            "POST",
            _ROUTE,
            json={name: value for name, value in fields.items() if value is not None},
            # With a key the client may retry the request.
            headers={"Idempotency-Key": uuid.uuid4().hex if key is None else key},
        )
        return read_job(response.text)

    async def get(self, job_id: str) -> Job:
        return read_job((await self._connection.ask("GET", _job_path(job_id))).text)

    async def cancel(self, job_id: str) -> Job:
        return read_job((await self._connection.ask("DELETE", _job_path(job_id))).text)

    async def retry(self, job_id: str) -> Job:
        return read_job((await self._connection.ask("POST", f"{_job_path(job_id)}/retry")).text)

    def list(self, *, state: JobState | None = None) -> AsyncGenerator[Job, None]:
        return _read_pages(
            self._connection, _ROUTE, read_jobs, {} if state is None else {"state": state}
        )

    def failures(self, job_id: str) -> AsyncGenerator[FailedShard, None]:
        return _read_pages(self._connection, f"{_job_path(job_id)}/failures", read_failures, {})

    async def watch(self, job_id: str) -> AsyncGenerator[Job, None]:
        last_event_id: str | None = None
        num_empty_streams = 0
        while True:
            pause_s = _PAUSE_S
            try:
                ended_job: Job | None = None
                async with aclosing(self._read_stream(job_id, last_event_id)) as changes:
                    async for event_id, job in changes:
                        last_event_id, num_empty_streams = event_id, 0
                        if job.ended is not None:
                            ended_job = job
                            break
                        yield job
                if ended_job is not None:  # yielded only after the stream is closed
                    yield ended_job
                    return
            except Unavailable as failure:
                num_empty_streams += 1
                has_answered = self._connection.has_answered
                if num_empty_streams > (
                    _MAX_EMPTY_STREAMS if has_answered else _MAX_EMPTY_STREAMS_BEFORE_FIRST_ANSWER
                ):
                    raise
                if isinstance(failure, Refused):
                    pause_s = max(pause_s, failure.problem.retry_after_s or 0.0)
            await asyncio.sleep(pause_s)

    async def test_webhook(self, url: str, *, secret: str | None = None) -> WebhookTestResult:
        if secret is None:
            webhooks = read_webhooks(
                await self._connection.ask("GET", _WEBHOOKS, params={"limit": _MAX_WEBHOOKS})
            )
            for webhook in webhooks:
                if webhook.url == url:
                    return await self._test_webhook(webhook.id)
        fields = {"url": url, "name": "test", "signing_secret": secret}
        created = read_webhook(await self._connection.ask("POST", _WEBHOOKS, json=fields))
        try:
            return await self._test_webhook(created.id)
        finally:
            await self._connection.ask("DELETE", f"{_WEBHOOKS}/{encode_name(created.id)}")

    async def _test_webhook(self, webhook_id: str) -> WebhookTestResult:
        path = f"{_WEBHOOKS}/{encode_name(webhook_id)}/test"
        return read_webhook_test(await self._connection.ask("POST", path))

    async def _read_stream(
        self, job_id: str, last_event_id: str | None
    ) -> AsyncGenerator[tuple[str | None, Job], None]:
        """Yields (event id, job) from one stream; if the server has no more events, yields
        (None, current job).
        """
        headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
        async with self._connection.events(
            f"{_job_path(job_id)}/events", headers=headers, silence_s=_SILENCE_S
        ) as source:
            if source.response.status_code == httpx.codes.NO_CONTENT:
                yield None, await self.get(job_id)
                return
            async with aclosing(source.aiter_sse()) as events:
                async for event in events:
                    if event.event == "job":  # other events only set the reconnection time
                        yield event.id, read_job(event.data)


class Jobs:
    """The batch jobs of one server, run by `mlcd worker`: label, embed or index whole archives.

    All methods raise the errors of `mlcd.client.refusals`; methods with a job_id raise
    RefusedNotFound if there is no such job.
    """

    def __init__(self, jobs: AsyncJobs, loop: LoopThread) -> None:
        self._jobs, self._loop = jobs, loop

    def upload(self, path: str | Path) -> UploadedImages:
        """Uploads an image, or a zip, tar or parquet file of images, in parts. Returns the `input`
        for `submit`.

        Raises RefusedInput if the server finds no images in the file.
        """
        return self._loop.run(self._jobs.upload(path))

    def download(self, job: Job, folder: str | Path = ".") -> builtins.list[Path]:
        """Downloads the result files of a succeeded job whose input was an upload; returns their
        paths.
        """
        return self._loop.run(self._jobs.download(job, folder))

    def submit(
        self,
        input: str | UploadedImages,  # noqa: A002 - named like the request's field
        output: str | None = None,
        *,
        kind: JobKind = "label",
        results: Sequence[ResultFormat] | None = None,
        key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Submits a job over all images of `input`, into the new directory `output`.

        input, output: absolute paths on the server and its workers. For an upload: pass the return
        value of `upload` as input, and in `results` the formats to download, without output. key:
        idempotency key; submitting again with the same key returns the first job. options: options
        of label jobs (`top`, `threshold`, `embeddings`), see `mlcd.label_job.LabelJob`. Raises
        RefusedConflict if the output exists.
        """
        return self._loop.run(
            self._jobs.submit(
                input,
                output,
                kind=kind,
                results=results,
                key=key,
                **options,
            )
        )

    def get(self, job_id: str) -> Job:
        """Returns the current state of the job."""
        return self._loop.run(self._jobs.get(job_id))

    def list(self, *, state: JobState | None = None) -> Generator[Job, None, None]:
        """Yields all jobs, or the jobs in one state, newest first; requests one page at a time."""
        return self._iterate(self._jobs.list(state=state))

    def failures(self, job_id: str) -> Generator[FailedShard, None, None]:
        """Yields the shards that failed, with reasons."""
        return self._iterate(self._jobs.failures(job_id))

    def cancel(self, job_id: str) -> Job:
        """Cancels the job; workers delete its partial output. Raises RefusedConflict if the job has
        already succeeded or failed.
        """
        return self._loop.run(self._jobs.cancel(job_id))

    def retry(self, job_id: str) -> Job:
        """Retries the failed shards; for a canceled job, all shards. Raises RefusedConflict if no
        shard failed.
        """
        return self._loop.run(self._jobs.retry(job_id))

    def watch(self, job_id: str) -> Generator[Job, None, None]:
        """Yields the current job, and the job after each change, until it has ended.

        Reconnects after a broken stream and continues from the last event. Raises Unavailable if
        streams fail for a minute, or for two seconds if the server has never answered.
        """
        return self._iterate(self._jobs.watch(job_id))

    def test_webhook(self, url: str, *, secret: str | None = None) -> WebhookTestResult:
        """Sends a test event to the webhook of this URL; returns the receiver's response.

        If the API key has no webhook for this URL, or if a secret is given, a temporary webhook is
        created and deleted after the test. Raises RefusedInput if the URL is not allowed or does
        not respond, RefusedConflict if the server sends no webhooks.
        """
        return self._loop.run(self._jobs.test_webhook(url, secret=secret))

    def _iterate(self, series: AsyncGenerator[_Value, None]) -> Generator[_Value, None, None]:
        try:
            while (value := self._loop.run(_next(series))) is not None:
                yield value
        except GeneratorExit:
            self._loop.finish(series.aclose())
            raise


def _read_parts(path: Path) -> Generator[bytes, None, None]:
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            yield part


@contextmanager
def _open_replacement(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file for writing; renames it to `path` on success."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as out:
            yield out
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


async def _next(series: AsyncGenerator[_Value, None]) -> _Value | None:
    return await anext(series, None)


def _job_path(job_id: str) -> str:
    return f"{_ROUTE}/{encode_name(job_id)}"
