"""One micro-batcher between the requests and an encoder.

While the engine works on one batch the next one fills, so batches grow with load. An idle engine waits at most
two milliseconds, and only for images that are known to be on their way: a lone request never waits. The queue is
bounded in images. When the engine fails, every waiter of the batch gets the error.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from mlcd.encoders.base import Encoder
from mlcd.errors import MlcdError, Overloaded, Unavailable
from service.observability.metrics import Metrics

_PROBE_TIMEOUT_S: Final = 2.0
_MAX_DELAY_S: Final = 0.002


@dataclass
class _Waiter:
    pixels: NDArray[np.uint8]
    future: "asyncio.Future[NDArray[np.float32]]"
    enqueued: float


class MicroBatcher:
    """Use as an async context manager; `encode` from any task of the same loop."""

    def __init__(self, encoder: Encoder, *, max_batch: int, max_queued: int, metrics: Metrics) -> None:
        self._encoder = encoder
        self._max_batch, self._max_queued = max_batch, max_queued
        self._metrics = metrics
        self._waiting: deque[_Waiter] = deque()
        self._arrived = asyncio.Event()
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._worker: asyncio.Task[None] | None = None
        self._healthy = False
        self._coming = 0

    @property
    def healthy(self) -> bool:
        """Whether the latest inference succeeded."""
        return self._healthy and self._worker is not None and not self._worker.done()

    async def __aenter__(self) -> Self:
        size = self._encoder.preprocess.crop
        blank = np.zeros((1, 3, size, size), np.uint8)
        loop = asyncio.get_running_loop()
        # Compile the kernels of the smallest and the largest batch before anybody waits for them.
        for batch in (blank, np.repeat(blank, self._max_batch, axis=0)):
            await loop.run_in_executor(self._engine, self._encoder.encode, batch)
        self._healthy = True
        self._worker = asyncio.create_task(self._run(), name="micro-batcher")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker
        self._fail(list(self._waiting), Unavailable("the server is stopping"))
        self._waiting.clear()
        self._engine.shutdown(wait=True, cancel_futures=True)

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """An image is being prepared and will be here soon; its batch may wait a moment for it."""
        self._coming += 1
        try:
            yield
        finally:
            self._coming -= 1

    async def probe(self) -> bool:
        """Whether an inference succeeds now: tried only where the latest one failed, so that probes do not pile up."""
        if not self.healthy and not self._waiting:
            size = self._encoder.preprocess.crop
            with contextlib.suppress(MlcdError, TimeoutError):
                await asyncio.wait_for(self.encode(np.zeros((3, size, size), np.uint8)), _PROBE_TIMEOUT_S)
        return self.healthy

    async def encode(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """One prepared image, uint8 [3, S, S], to its unit embedding [D].

        Raises Overloaded when the queue is full, Unavailable when the engine fails.
        """
        if len(self._waiting) >= self._max_queued:
            raise Overloaded("the server is at its limit of queued images", remedy="try again in a moment")
        waiter = _Waiter(pixels, asyncio.get_running_loop().create_future(), time.perf_counter())
        self._waiting.append(waiter)
        self._arrived.set()
        return await waiter.future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            await self._gather()
            batch = self._take()
            if not batch:
                continue
            started = time.perf_counter()
            try:
                pixels = np.stack([waiter.pixels for waiter in batch])
                rows = await loop.run_in_executor(self._engine, self._encoder.encode, pixels)
            except asyncio.CancelledError:
                self._fail(batch, Unavailable("the server is stopping"))
                raise
            except MlcdError as error:
                self._healthy = False
                self._fail(batch, error)
            except Exception as error:  # noqa: BLE001 - whatever an engine raises, nobody may be left waiting
                self._healthy = False
                self._fail(batch, Unavailable("the engine failed"), cause=error)
            else:
                self._healthy = True
                self._metrics.batch(len(batch), time.perf_counter() - started, started - batch[0].enqueued)
                for waiter, row in zip(batch, rows, strict=True):
                    if not waiter.future.done():
                        waiter.future.set_result(row)

    async def _gather(self) -> None:
        """Let what arrives together, or is announced and arrives in time, ride together."""
        deadline = time.perf_counter() + _MAX_DELAY_S
        await asyncio.sleep(0)
        while self._coming and len(self._waiting) < self._max_batch and time.perf_counter() < deadline:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), deadline - time.perf_counter())

    def _take(self) -> list[_Waiter]:
        """Up to max_batch waiters; those whose client has gone are dropped."""
        batch: list[_Waiter] = []
        while self._waiting and len(batch) < self._max_batch:
            waiter = self._waiting.popleft()
            if waiter.future.done():
                self._metrics.dropped("client_gone")
            else:
                batch.append(waiter)
        if not self._waiting:
            self._arrived.clear()
        return batch

    @staticmethod
    def _fail(waiters: list[_Waiter], error: MlcdError, cause: Exception | None = None) -> None:
        error.__cause__ = error.__cause__ or cause
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)
