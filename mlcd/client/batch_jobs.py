"""Batch jobs of a server: `Client.jobs` and `AsyncClient.jobs`."""

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing
from typing import Any, Final, TypeVar, Unpack

import httpx

from mlcd.client.connection import Connection, encode_name
from mlcd.client.loop_thread import LoopThread
from mlcd.client.reading import (
    read_failures,
    read_job,
    read_jobs,
    read_webhook,
    read_webhook_test,
    read_webhooks,
)
from mlcd.client.refusals import Refused
from mlcd.errors import InvalidInput, Unavailable
from mlcd.label_job import JobKind, JobOptions
from mlcd.wire.queued_jobs import FailedShard, Job, JobState
from mlcd.wire.webhooks import WebhookTestResult

_ROUTE: Final = "/v1/jobs"
_WEBHOOKS: Final = "/v1/webhook_endpoints"
_MOST_WEBHOOKS: Final = 100  # of a key
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

    async def submit(
        self,
        input: str,  # noqa: A002 - the word of the field, as in the request
        output: str,
        *,
        kind: JobKind = "label",
        key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        if key is not None and not _KEY.fullmatch(key):
            raise InvalidInput(
                "the idempotency key cannot be sent",
                remedy="give 1 to 255 printable characters of ASCII, no spaces",
            )
        fields = {"kind": kind, "input": input, "output": output, **options}
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

    def submit(
        self,
        input: str,  # noqa: A002 - the word of the field, as in the request
        output: str,
        *,
        kind: JobKind = "label",
        key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Submits a job over all images of `input`, into the new directory `output`.

        Both are absolute paths as the server and its workers see them. key: an idempotency key; a
        second submission with it returns the job of the first. options: those of label jobs, `top`,
        `threshold` and `embeddings`; see `mlcd.label_job.LabelJob`. Raises RefusedConflict where
        the output exists.
        """
        return self._loop.run(
            self._jobs.submit(
                input,
                output,
                kind=kind,
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


async def _next(series: AsyncGenerator[_Value, None]) -> _Value | None:
    return await anext(series, None)


def _path(job_id: str) -> str:
    return f"{_ROUTE}/{encode_name(job_id)}"
