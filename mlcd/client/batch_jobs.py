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
_MOST_WEBHOOKS: Final = 100  # of a key
_PART_BYTES: Final = 2**24  # a part must arrive within the deadline of one request
_PAGE_SIZE: Final = 200  # the most that the server gives
_KEY: Final = re.compile(r"[!-~]{1,255}")  # what a header can hold
# The longest time without a byte on a stream; a server's signs of life come more often.
_SILENCE_S: Final = 60.0
_PAUSE_S: Final = 1.0  # before the next stream of events is opened
# Streams in a row that bring nothing at all: of a server that has answered, and of another.
_PATIENCE: Final = 60
_PATIENCE_AT_FIRST: Final = 2
_Value = TypeVar("_Value")
_Cursor = TypeVar("_Cursor", str, int)


async def _read_pages(
    connection: Connection,
    path: str,
    read: Callable[[httpx.Response], tuple[list[_Value], _Cursor | None]],
    filters: dict[str, str],
) -> AsyncGenerator[_Value, None]:
    """Yields what all pages hold, each of them asked for when the one before is used up."""
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
        begun = {"filename": path.name, "purpose": "images", "bytes": path.stat().st_size}
        upload = read_upload(await self._connection.ask("POST", _UPLOADS, json=begun))
        route = f"{_UPLOADS}/{encode_name(upload.id)}"
        part_ids = [
            read_part(await self._connection.ask("POST", f"{route}/parts", part=part)).id
            for part in _parts_of(path)
        ]
        done = read_upload(
            await self._connection.ask("POST", f"{route}/complete", json={"part_ids": part_ids})
        )
        if done.file is None:
            raise not_our_api()
        return UploadedImages(file=done.file.id)

    async def download(self, job: Job, folder: str | Path = ".") -> builtins.list[Path]:
        paths = []
        for file_id in (job.results or {}).values():
            route = f"{_FILES}/{encode_name(file_id)}"
            file = read_file(await self._connection.ask("GET", route))
            path = Path(folder) / PurePosixPath(file.filename.replace("\\", "/")).name
            with _replacing(path) as out:
                await self._connection.download(f"{route}/content", out)
            paths.append(path)
        return paths

    async def submit(
        self,
        input: str | UploadedImages,  # noqa: A002 - the word of the field, as in the request
        output: str | None = None,
        *,
        kind: JobKind = "label",
        results: Sequence[ResultFormat] | None = None,
        key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        if key is not None and not _KEY.fullmatch(key):
            raise InvalidInput(
                "the idempotency key cannot be sent",
                remedy="give 1 to 255 printable characters of ASCII, no spaces",
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
            # With a key the request may be repeated.
            headers={"Idempotency-Key": uuid.uuid4().hex if key is None else key},
        )
        return read_job(response.text)

    async def get(self, job_id: str) -> Job:
        return read_job((await self._connection.ask("GET", _path(job_id))).text)

    async def cancel(self, job_id: str) -> Job:
        return read_job((await self._connection.ask("DELETE", _path(job_id))).text)

    async def retry(self, job_id: str) -> Job:
        return read_job((await self._connection.ask("POST", f"{_path(job_id)}/retry")).text)

    def list(self, *, state: JobState | None = None) -> AsyncGenerator[Job, None]:
        return _read_pages(
            self._connection, _ROUTE, read_jobs, {} if state is None else {"state": state}
        )

    def failures(self, job_id: str) -> AsyncGenerator[FailedShard, None]:
        return _read_pages(self._connection, f"{_path(job_id)}/failures", read_failures, {})

    async def watch(self, job_id: str) -> AsyncGenerator[Job, None]:
        last: str | None = None
        in_vain = 0
        while True:
            pause_s = _PAUSE_S
            try:
                ended: Job | None = None
                async with aclosing(self._changes(job_id, last)) as changes:
                    async for number, job in changes:
                        last, in_vain = number, 0
                        if job.ended is not None:
                            ended = job
                            break
                        yield job
                if ended is not None:  # the stream is closed before the caller sees the end
                    yield ended
                    return
            except Unavailable as failure:
                in_vain += 1
                has_answered = self._connection.has_answered
                if in_vain > (_PATIENCE if has_answered else _PATIENCE_AT_FIRST):
                    raise
                if isinstance(failure, Refused):
                    pause_s = max(pause_s, failure.problem.retry_after_s or 0.0)
            await asyncio.sleep(pause_s)

    async def test_webhook(self, url: str, *, secret: str | None = None) -> WebhookTestResult:
        if secret is None:
            webhooks = read_webhooks(
                await self._connection.ask("GET", _WEBHOOKS, params={"limit": _MOST_WEBHOOKS})
            )
            for webhook in webhooks:
                if webhook.url == url:
                    return await self._test_webhook(webhook.id)
        fields = {"url": url, "name": "test", "signing_secret": secret}
        made = read_webhook(await self._connection.ask("POST", _WEBHOOKS, json=fields))
        try:
            return await self._test_webhook(made.id)
        finally:
            await self._connection.ask("DELETE", f"{_WEBHOOKS}/{encode_name(made.id)}")

    async def _test_webhook(self, webhook_id: str) -> WebhookTestResult:
        path = f"{_WEBHOOKS}/{encode_name(webhook_id)}/test"
        return read_webhook_test(await self._connection.ask("POST", path))

    async def _changes(
        self, job_id: str, last: str | None
    ) -> AsyncGenerator[tuple[str | None, Job], None]:
        """The events of one stream, with their ids; after the last one, the job as it stands."""
        headers = {} if last is None else {"Last-Event-ID": last}
        async with self._connection.events(
            f"{_path(job_id)}/events", headers=headers, silence_s=_SILENCE_S
        ) as source:
            if source.response.status_code == httpx.codes.NO_CONTENT:
                yield None, await self.get(job_id)
                return
            async with aclosing(source.aiter_sse()) as events:
                async for event in events:
                    if event.event == "job":  # not the server's `retry`
                        yield event.id, read_job(event.data)


class Jobs:
    """The batch jobs of one server: label, embed or index whole archives. `mlcd worker` does them.

    All methods raise the errors of `mlcd.client.refusals`; those that name a job raise
    RefusedNotFound.
    """

    def __init__(self, jobs: AsyncJobs, loop: LoopThread) -> None:
        self._jobs, self._loop = jobs, loop

    def upload(self, path: str | Path) -> UploadedImages:
        """Uploads one image, or a zip, tar or parquet file of many, in parts; give the result to
        `submit`.

        Raises RefusedInput where the server finds no images in it.
        """
        return self._loop.run(self._jobs.upload(path))

    def download(self, job: Job, folder: str | Path = ".") -> builtins.list[Path]:
        """Downloads the results of a job on an upload that has succeeded; returns their paths."""
        return self._loop.run(self._jobs.download(job, folder))

    def submit(
        self,
        input: str | UploadedImages,  # noqa: A002 - the word of the field, as in the request
        output: str | None = None,
        *,
        kind: JobKind = "label",
        results: Sequence[ResultFormat] | None = None,
        key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Submits a job over all images of `input`, into the new directory `output`.

        Both are absolute paths as the server and its workers see them; or the input is what
        `upload` returned, and results are the formats for `download`. key: an idempotency key; a
        second submission with it returns the job of the first. options: those of label jobs, `top`,
        `threshold` and `embeddings`; see `mlcd.label_job.LabelJob`. Raises RefusedConflict where
        the output exists.
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
        """Returns the job as it stands."""
        return self._loop.run(self._jobs.get(job_id))

    def list(self, *, state: JobState | None = None) -> Generator[Job, None, None]:
        """Yields all jobs, or those in one state, newest first; asks for a page at a time."""
        return self._each(self._jobs.list(state=state))

    def failures(self, job_id: str) -> Generator[FailedShard, None, None]:
        """Yields the shards that were left aside, with reasons."""
        return self._each(self._jobs.failures(job_id))

    def cancel(self, job_id: str) -> Job:
        """Cancels the job; workers remove what it has written. Raises RefusedConflict where it has
        ended otherwise.
        """
        return self._loop.run(self._jobs.cancel(job_id))

    def retry(self, job_id: str) -> Job:
        """Does again what has failed; of a canceled job, everything. Raises RefusedConflict where
        nothing has.
        """
        return self._loop.run(self._jobs.retry(job_id))

    def watch(self, job_id: str) -> Generator[Job, None, None]:
        """Yields the job as it stands, and after each change, until it has ended.

        A stream that breaks is opened again and goes on where it was. Raises Unavailable after a
        minute without any, or two seconds where the server has never answered.
        """
        return self._each(self._jobs.watch(job_id))

    def test_webhook(self, url: str, *, secret: str | None = None) -> WebhookTestResult:
        """Sends an event to the webhook of this URL, and returns what its receiver answered.

        Where this key has none, or with a secret, the webhook is made for the test alone. Raises
        RefusedInput where the URL may not be asked or does not answer, and RefusedConflict where
        the server sends no webhooks.
        """
        return self._loop.run(self._jobs.test_webhook(url, secret=secret))

    def _each(self, series: AsyncGenerator[_Value, None]) -> Generator[_Value, None, None]:
        try:
            while (value := self._loop.run(_next(series))) is not None:
                yield value
        except GeneratorExit:
            self._loop.finish(series.aclose())
            raise


def _parts_of(path: Path) -> Generator[bytes, None, None]:
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            yield part


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that is at `path` once it is complete."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as out:
            yield out
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


async def _next(series: AsyncGenerator[_Value, None]) -> _Value | None:
    return await anext(series, None)


def _path(job_id: str) -> str:
    return f"{_ROUTE}/{encode_name(job_id)}"
