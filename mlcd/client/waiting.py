"""The parts that the two clients do not share: how each waits for the server and reads a series.

`make client` writes the other half, `synchronous.py`, from `asynchronous.py`: there `AsyncBase` and
`AsyncSeries` become `SyncBase` and `SyncSeries`.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Coroutine,
    Generator,
    Iterable,
)
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlcd.client.base import Ask, BaseClient
from mlcd.client.batch_jobs import AsyncJobs, Jobs
from mlcd.client.batches import answers_async, answers_sync
from mlcd.client.loop_thread import LoopThread
from mlcd.client.results import Answer
from mlcd.errors import ImageRejected
from mlcd.image_bytes import ImageInput, image_bytes

_Batch = TypeVar("_Batch")
_Item = TypeVar("_Item")
_Value = TypeVar("_Value")

AsyncSeries = Iterable[_Item] | AsyncIterable[_Item]
SyncSeries = Iterable[_Item]


class AsyncBase(BaseClient):
    """The asynchronous form of `Client`, to be used from one event loop; a series of images may be
    asynchronous too.
    """

    @property
    def jobs(self) -> AsyncJobs:
        """The batch jobs of the server. Its methods raise RefusedConflict where the server takes no
        jobs.
        """
        return self._jobs

    async def aclose(self) -> None:
        """Ends all requests in flight."""
        await self._server.aclose()

    async def _wait(self, work: Coroutine[Any, Any, _Value]) -> _Value:
        return await work

    def _answers(
        self, batches: AsyncIterable[_Batch], ask: Ask[_Batch, _Value]
    ) -> AsyncGenerator[Answer[_Value], None]:
        return answers_async(batches, ask, in_flight=self.in_flight)

    async def _series(self, items: AsyncSeries[_Item]) -> AsyncIterator[_Item]:
        if isinstance(items, AsyncIterable):
            async for item in items:
                yield item
        else:
            for item in items:
                yield item

    async def _encode(self, image: ImageInput, *, max_bytes: int) -> bytes | ImageRejected:
        return await asyncio.to_thread(image_bytes, image, max_bytes=max_bytes)


@dataclass(eq=False, repr=False)
class SyncBase(BaseClient):
    """A client whose requests run in a thread of its own; it reads the series of images in the
    caller's thread.

    Threads may share a client. Close it, or use it in a `with`.
    """

    _loop: LoopThread = field(init=False)

    def __post_init__(self, *arguments: Any) -> None:
        super().__post_init__(*arguments)
        self._loop = LoopThread(self._server.aclose)

    @property
    def jobs(self) -> Jobs:
        """The batch jobs of the server. Its methods raise RefusedConflict where the server takes no
        jobs.
        """
        return Jobs(self._jobs, self._loop)

    def close(self) -> None:
        """Ends all requests in flight."""
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, _Value]) -> _Value:
        return self._loop.run(work)

    def _answers(
        self, batches: Iterable[_Batch], ask: Ask[_Batch, _Value]
    ) -> Generator[Answer[_Value], None, None]:
        def start(batch: _Batch) -> Future[Answer[_Value]]:
            return self._loop.start(ask(batch))

        return answers_sync(batches, start, in_flight=self.in_flight)

    def _series(self, items: SyncSeries[_Item]) -> SyncSeries[_Item]:
        return items

    def _encode(self, image: ImageInput, *, max_bytes: int) -> bytes | ImageRejected:
        return image_bytes(image, max_bytes=max_bytes)
