"""The work on batches: the lines of the input are requests to this very application.

The answer to a line has the bytes that the route answers a client with, because the route makes it.
Requests for the labels of one image each are joined (`mlcd.service.http.joined_requests`).
Lines are answered in windows, two at once; each is synced to the disk and counted in its turn.
"""

import asyncio
import logging
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import orjson
from fastapi import FastAPI
from starlette.types import Message, Scope

from mlcd.errors import ArtifactInvalid, ImageRejected, MlcdError, NotFound
from mlcd.service.http.auth import CALLER, JOINED
from mlcd.service.http.joined_requests import (
    JOINED_ENDPOINT,
    MAX_JOINED,
    MAX_JOINED_BYTES,
    join_bodies,
    split_answer,
)
from mlcd.service.http.problems import RETRYABLE_STATUSES
from mlcd.service.jobs.batch_inputs import MISSING, InputRequest, count_requests, read_requests
from mlcd.service.jobs.batches import BatchStore, InputFault, StoredBatch
from mlcd.service.jobs.files import new_id
from mlcd.service.resources import Resources
from mlcd.service.settings import Files
from mlcd.service.timings import BATCH_LONGEST_WAIT_S, BATCH_POLL_S, FILES_SWEEP_S

_log = logging.getLogger("mlcd.batches")
_WINDOWS: Final = 2  # while the last lines of one are answered and written, the other keeps on
_WINDOW_BYTES: Final = 2**24  # of the lines of a window, but for one long line
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class _Line:
    """A request of the input. body: a rejection if the image of the request cannot be read.
    has_one_image: see `InputRequest`.
    """

    custom_id: str
    media_type: str
    body: bytes | ImageRejected
    has_one_image: bool


@dataclass(frozen=True)
class _Result:
    """A line of the output file, or of the error file."""

    is_success: bool
    content: bytes


@asynccontextmanager
async def run_batches(app: FastAPI, store: BatchStore | None) -> AsyncIterator[None]:
    """Works on batches while the context lasts; enter it in the event loop that serves the app."""
    if store is None:
        yield
        return
    runner = BatchRunner(app, store)
    running = asyncio.create_task(runner.run(), name="batches")
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


class BatchRunner:
    """Works on the open batches of a store, several at once, until it is cancelled."""

    def __init__(self, app: FastAPI, store: BatchStore) -> None:
        self._app, self._store = app, store
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="batches")
        self._running: dict[str, tuple[str | None, asyncio.Task[None]]] = {}
        self._sweep_due_s = 0.0

    @property
    def _settings(self) -> Files:
        resources: Resources = self._app.state.resources
        return resources.settings.files

    async def run(self) -> None:
        """Begins open batches as there is room. A key's first batch comes before another's second.

        While the store cannot be read, no batch begins.
        """
        try:
            while True:
                if self._store.files.exists:
                    with suppress(MlcdError):
                        await self._begin_batches()
                        await self._sweep()
                await asyncio.sleep(BATCH_POLL_S)
        finally:
            tasks = [task for _, task in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _begin_batches(self) -> None:
        for batch_id, (_, task) in list(self._running.items()):
            if task.done():
                del self._running[batch_id]
        open_batches = await self._in_thread(self._store.open_batches)
        waiting = [
            batch
            for batch in open_batches
            if batch.id not in self._running and (self._serves(batch) or _is_over(batch))
        ]
        num_running = Counter(owner for owner, _ in self._running.values())
        for batch in order_fairly(waiting, num_running):
            if len(self._running) >= self._settings.batches_at_once:
                return
            task = asyncio.create_task(self._work_on(batch.id), name=batch.id)
            self._running[batch.id] = batch.owner, task

    def _serves(self, batch: StoredBatch) -> bool:
        """Returns whether the model of the batch is served now."""
        resources: Resources = self._app.state.resources
        return resources.encoder.fingerprint == batch.fingerprint

    async def _sweep(self) -> None:
        if time.monotonic() < self._sweep_due_s:
            return
        self._sweep_due_s = time.monotonic() + FILES_SWEEP_S
        await self._in_thread(self._store.files.sweep)
        await self._in_thread(self._store.sweep, self._settings.keep_days)

    async def _work_on(self, batch_id: str) -> None:
        try:
            with self._store.hold(batch_id) as held:
                if held:
                    batch = await self._in_thread(self._store.update, batch_id, _begin)
                    if not batch.has_ended:
                        await self._answer_all(batch)
        except NotFound:  # the batch was swept
            return
        except Exception as error:  # noqa: BLE001 - the others go on, and it is tried again
            kind = error.name if isinstance(error, MlcdError) else type(error).__name__
            _log.error("%s cannot continue now: %s", batch_id, kind)
            await asyncio.sleep(BATCH_LONGEST_WAIT_S)

    async def _answer_all(self, batch: StoredBatch) -> None:
        source = self._store.files.path(batch.input_file_id)
        if batch.state == "validating":
            batch = await self._validate(batch, source)
            if batch.has_ended:
                return
        if batch.done < batch.total and not source.exists():
            await self._in_thread(_finish, self._store, batch, MISSING)
            return
        drafts = await self._in_thread(_Drafts, self._store, batch)
        requests = await self._in_thread(self._read_requests, batch, source)
        num_windows = min(_WINDOWS, self._settings.batch_concurrency)
        window_lines = self._settings.batch_concurrency // num_windows
        windows, num_taken = deque[asyncio.Task[list[_Result]]](), batch.done
        try:
            while batch.done < batch.total:
                is_open = batch.state == "in_progress" and time.time() <= batch.expires_s
                while is_open and len(windows) < num_windows and num_taken < batch.total:
                    if not self._serves(batch):
                        return  # until its model is served again
                    lines = await self._in_thread(_take, requests, window_lines)
                    windows.append(asyncio.create_task(self._answer_window(batch, lines)))
                    num_taken += len(lines)
                if not windows:
                    break
                batch = await self._in_thread(drafts.count, batch, await windows.popleft())
            if batch.done < batch.total:
                batch = await self._in_thread(self._store.update, batch.id, _end_early)
                batch = await self._in_thread(_give_up, drafts, batch, requests)
        finally:
            for window in windows:
                window.cancel()
            drafts.close()
        await self._in_thread(_finish, self._store, batch)
        _log.info("%s: %d answers, %d errors", batch.id, batch.completed, batch.failed)

    def _read_requests(self, batch: StoredBatch, source: Path) -> Iterator[InputRequest]:
        if batch.done == batch.total:
            return iter(())  # its input may be gone
        resources: Resources = self._app.state.resources
        return read_requests(
            source,
            batch.done,
            endpoint=batch.endpoint,
            model=resources.encoder.name,
            filename=self._store.files.find(batch.input_file_id, batch.owner).filename,
        )

    async def _validate(self, batch: StoredBatch, source: Path) -> StoredBatch:
        total, faults = await self._in_thread(
            count_requests, source, batch.endpoint, self._settings.max_batch_lines
        )
        if faults:
            failed = replace(batch, faults=tuple(faults)).become("failed")
            return await self._in_thread(self._store.update, batch.id, lambda _: failed)

        def begin(stored: StoredBatch) -> StoredBatch:
            counted = replace(stored, total=total)
            return counted if stored.state == "cancelling" else counted.become("in_progress")

        return await self._in_thread(self._store.update, batch.id, begin)

    async def _answer_window(self, batch: StoredBatch, window: Sequence[_Line]) -> list[_Result]:
        groups = _group_lines(window) if self._joins(batch) else [[line] for line in window]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._answer_group(batch, lines)) for lines in groups]
        return [result for task in tasks for result in task.result()]

    def _joins(self, batch: StoredBatch) -> bool:
        """Returns whether requests are joined: not those of a key with a rate, from which a refused
        request is taken, too.
        """
        keys = self._app.state.resources.keys
        if batch.endpoint != JOINED_ENDPOINT or keys is None:
            return batch.endpoint == JOINED_ENDPOINT
        try:
            return keys.find(batch.owner).rate is None
        except MlcdError:  # the key is revoked
            return False

    async def _answer_group(self, batch: StoredBatch, lines: Sequence[_Line]) -> list[_Result]:
        """Answers lines by one request; those that it leaves without an answer are sent alone."""
        results = await self._answer_joined(batch, lines) if len(lines) > 1 else [None]
        async with asyncio.TaskGroup() as group:
            tasks = {
                place: group.create_task(self._answer(batch, lines[place]))
                for place, result in enumerate(results)
                if result is None
            }
        return [result or tasks[place].result() for place, result in enumerate(results)]

    async def _answer_joined(
        self, batch: StoredBatch, lines: Sequence[_Line]
    ) -> Sequence[_Result | None]:
        """Returns the results of lines; None for one with an error, and for all if the request is
        refused.
        """
        request_id = f"{batch.id}-{new_id('')}"
        bodies = [line.body for line in lines if isinstance(line.body, bytes)]
        media_type, body = join_bodies(lines[0].media_type, bodies)
        scope = _scope(batch, media_type, len(body), request_id)
        status, _, answer = await self._call({**scope, JOINED: True}, body)
        if status != HTTPStatus.OK:
            return [None] * len(lines)
        return [
            None if part is None else _result(line.custom_id, status, request_id, part)
            for line, part in zip(lines, split_answer(answer, len(lines)), strict=True)
        ]

    async def _answer(self, batch: StoredBatch, line: _Line) -> _Result:
        """Answers a line; one that is refused for load is tried again until the batch expires."""
        if isinstance(line.body, ImageRejected):
            return _failure(line.custom_id, line.body.reason, str(line.body))
        while True:
            request_id = f"{batch.id}-{new_id('')}"
            status, retry_after_s, body = await self._call(
                _scope(batch, line.media_type, len(line.body), request_id), line.body
            )
            if status not in RETRYABLE_STATUSES or time.time() + retry_after_s > batch.expires_s:
                return _result(line.custom_id, status, request_id, body)
            await asyncio.sleep(min(retry_after_s, BATCH_LONGEST_WAIT_S))

    async def _call(self, scope: Scope, body: bytes) -> tuple[int, float, bytearray]:
        """Returns the status of an answer, its Retry-After in seconds, and its body."""
        status, retry_after_s, answer = 0, 1.0, bytearray()
        incoming = [{"type": "http.request", "body": body, "more_body": False}]
        never = asyncio.Event()

        async def receive() -> Message:
            if incoming:
                return incoming.pop()
            await never.wait()
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status, retry_after_s
            if message["type"] == "http.response.start":
                status = message["status"]
                retry_after_s = float(dict(message["headers"]).get(b"retry-after", b"1"))
            else:
                answer.extend(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, retry_after_s, answer

    async def _in_thread(self, call: Callable[..., _Answer], *arguments: Any) -> _Answer:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, call, *arguments)


def order_fairly(
    batches: Sequence[StoredBatch], num_running: Counter[str | None]
) -> list[StoredBatch]:
    """Orders batches so that owners take turns; of one owner the oldest is first.

    num_running: the batches of each owner that are worked on already.
    """
    turns = Counter(num_running)
    ordered = []
    for place, batch in enumerate(batches):
        ordered.append((turns[batch.owner], place, batch))
        turns[batch.owner] += 1
    return [batch for _, _, batch in sorted(ordered, key=lambda entry: entry[:2])]


def _take(requests: Iterator[InputRequest], num: int) -> list[_Line]:
    """Returns the next lines: at most `num`, and fewer where they are long."""
    window, num_bytes = list[_Line](), 0
    for request in requests:
        try:
            body: bytes | ImageRejected = request.read_body()
        except ImageRejected as rejection:
            body = rejection
        has_one_image = request.has_one_image and isinstance(body, bytes)
        window.append(_Line(request.custom_id, request.media_type, body, has_one_image))
        num_bytes += 0 if isinstance(body, ImageRejected) else len(body)
        if len(window) == num or num_bytes >= _WINDOW_BYTES:
            break
    if not window:
        raise ArtifactInvalid("the input of a batch became shorter")
    return window


def _group_lines(window: Sequence[_Line]) -> list[list[_Line]]:
    """Returns the lines of a window, in order, in groups that one request can answer."""
    groups: list[list[_Line]] = []
    num_bytes = 0
    for line in window:
        size = len(line.body) if isinstance(line.body, bytes) else 0
        group = groups[-1] if groups else []
        if (
            line.has_one_image
            and group
            and group[0].has_one_image
            and len(group) < MAX_JOINED
            and num_bytes + size <= MAX_JOINED_BYTES
        ):
            group.append(line)
            num_bytes += size
        else:
            groups.append([line])
            num_bytes = size
    return groups


class _Drafts:
    """The drafts of the output and error file of a batch."""

    def __init__(self, store: BatchStore, batch: StoredBatch) -> None:
        self._store = store
        self._output = _open_at(store, batch.output_file_id, batch.output_bytes)
        self._errors = _open_at(store, batch.error_file_id, batch.error_bytes)

    def count(self, batch: StoredBatch, results: Sequence[_Result]) -> StoredBatch:
        """Writes results to the disk, and then counts them; returns the batch as it is then."""
        for result in results:
            (self._output if result.is_success else self._errors).write(result.content)
        sizes = [self._sync(file) for file in (self._output, self._errors)]
        num_good = sum(result.is_success for result in results)

        def add(stored: StoredBatch) -> StoredBatch:
            return replace(
                stored,
                completed=batch.completed + num_good,
                failed=batch.failed + len(results) - num_good,
                output_bytes=sizes[0],
                error_bytes=sizes[1],
            )

        return self._store.update(batch.id, add)

    def close(self) -> None:
        self._output.close()
        self._errors.close()

    @staticmethod
    def _sync(file: BinaryIO) -> int:
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _open_at(store: BatchStore, file_id: str, num_bytes: int) -> BinaryIO:
    """Opens a draft, cut to the bytes that are counted, at its end."""
    path = store.files.draft_path(file_id)
    if not path.exists() and store.files.path(file_id).exists():
        store.files.path(file_id).rename(path)  # a crash came between two steps of `_finish`
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    file.truncate(num_bytes)
    file.seek(num_bytes)
    return file


def _give_up(drafts: _Drafts, batch: StoredBatch, requests: Iterator[InputRequest]) -> StoredBatch:
    """Writes the requests without an answer to the error file of a batch that ends early."""
    code = "batch_expired" if "expired" in batch.times else "batch_cancelled"
    message = "the batch ended before this request was answered"
    while num_left := min(batch.total - batch.done, 1000):
        results = [
            _failure(request.custom_id, code, message) for request in islice(requests, num_left)
        ]
        if not results:
            raise ArtifactInvalid("the input of a batch became shorter")
        batch = drafts.count(batch, results)
    return batch


def _finish(store: BatchStore, batch: StoredBatch, fault: InputFault | None = None) -> None:
    """Publishes the files of a batch, and ends it. fault: why some lines lack an answer."""
    names = {batch.output_file_id: "output", batch.error_file_id: "error"}
    counts = {batch.output_file_id: batch.output_bytes, batch.error_file_id: batch.error_bytes}
    for file_id, name in names.items():
        if counts[file_id]:
            filename = f"{batch.id}_{name}.jsonl"
            store.files.publish(file_id, batch.owner, filename, "batch_output")
        else:
            store.files.draft_path(file_id).unlink(missing_ok=True)

    def end(stored: StoredBatch) -> StoredBatch:
        if fault is not None:
            return replace(stored, faults=(fault,)).become("failed")
        if stored.state == "cancelling":
            return stored.become("cancelled")
        return stored.become("expired" if "expired" in stored.times else "completed")

    store.update(batch.id, end)


def _begin(batch: StoredBatch) -> StoredBatch:
    if batch.state == "cancelling" and not batch.total:
        return batch.become("cancelled")  # before its input was read
    return batch


def _end_early(batch: StoredBatch) -> StoredBatch:
    if batch.state == "cancelling":
        return batch
    return replace(batch, times={**batch.times, "expired": time.time()}).become("finalizing")


def _is_over(batch: StoredBatch) -> bool:
    return batch.state == "cancelling" or time.time() > batch.expires_s


def _result(custom_id: str, status: int, request_id: str, body: bytes | bytearray) -> _Result:
    response = (
        b'{"status_code":%d,"request_id":%b,"body":' % (status, orjson.dumps(request_id))
        + bytes(body)
        + b"}"
    )
    return _Result(
        is_success=status < 300,
        content=_to_line(custom_id, response, None),
    )


def _failure(custom_id: str, code: str, message: str) -> _Result:
    """Returns the result of a request that no route has answered."""
    error = {"code": code, "message": message}
    return _Result(is_success=False, content=_to_line(custom_id, None, error))


def _to_line(custom_id: str, response: bytes | None, error: dict[str, str] | None) -> bytes:
    """Returns a line of an output or error file, with the bytes of the response as they are."""
    start = {"id": new_id("batch_req_"), "custom_id": custom_id}
    return (
        orjson.dumps(start)[:-1]
        + b',"response":'
        + (b"null" if response is None else response)
        + b',"error":'
        + orjson.dumps(error)
        + b"}\n"
    )


def _scope(batch: StoredBatch, media_type: str, num_bytes: int, request_id: str) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "2",  # which needs no Host header
        "method": "POST",
        "scheme": "http",
        "path": batch.endpoint,
        "raw_path": batch.endpoint.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", media_type.encode()),
            (b"content-length", str(num_bytes).encode()),
            (b"x-request-id", request_id.encode()),
        ],
        "client": None,
        "server": None,
        "state": {},
        CALLER: batch.owner,
    }
