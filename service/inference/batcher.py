"""The micro-batcher between the requests and an engine.

The next batch fills while the engine computes one, so batches grow with load. A full batch is sent
ahead and waits at the engine, so that the engine is never idle. An idle engine waits at most two
milliseconds, and only for expected items: a single request never waits. Requests take turns. If
the engine fails, every item of the batch gets the error; items still in the queue go to the next
engine process.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import DeadlineExceeded, MlcdError, Overloaded, Unavailable
from mlcd.service.inference.contract import Row
from mlcd.service.inference.engine.process import EngineBatch, Inference
from mlcd.service.inference.engine.slots import MOST_LABELS, NUM_SLOTS
from mlcd.service.inference.engine.supervised import BatchEngine
from mlcd.service.inference.engine_labels import EngineLabels, find_requested_labels
from mlcd.service.inference.fair import FairQueue
from mlcd.service.telemetry.text_metrics import TowerMetrics
from mlcd.service.timings import MAX_BATCH_DELAY_S
from mlcd.types import Embeddings


@dataclass(frozen=True)
class _Waiter:
    item: NDArray[Any]
    future: "asyncio.Future[Row]"
    deadline: float
    enqueued: float
    labels: EngineLabels | None
    is_row: bool = False

    @property
    def top(self) -> int:
        """The number of labels that the engine finds for this item."""
        return 0 if self.labels is None else self.labels.top


class MicroBatcher:
    """A `Dispatcher` of images or of texts. Use as an async context manager."""

    def __init__(
        self,
        engine: BatchEngine,
        *,
        max_batch: int,
        max_queued: int,
        metrics: TowerMetrics,
        item_kind: str = "images",
    ) -> None:
        """max_batch: batch size limit. max_queued: items in the queue. item_kind: name of the
        items.
        """
        self._engine = engine
        self._max_batch, self._max_queued = max_batch, max_queued
        self._metrics, self._item_kind = metrics, item_kind
        self._waiting: FairQueue[_Waiter] = FairQueue()
        self._changed = asyncio.Event()
        self._at_engine: set[asyncio.Task[None]] = set()
        self._num_expected = 0
        metrics.queue_depth("engine", lambda: len(self._waiting))

    async def __aenter__(self) -> Self:
        self._loop = asyncio.create_task(self._run(), name="micro-batcher")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [self._loop, *self._at_engine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stopping = Unavailable("the server is stopping")
        _fail([self._waiting.take() for _ in range(len(self._waiting))], stopping)

    @contextlib.contextmanager
    def expect_item(self) -> Iterator[None]:
        """Expects an item within the context; the next batch may wait for it briefly."""
        self._num_expected += 1
        try:
            yield
        finally:
            self._num_expected -= 1

    async def encode(
        self, item: NDArray[Any], *, deadline: float = np.inf, request: object | None = None
    ) -> Row:
        """Encodes one item; see `Dispatcher.encode`."""
        if len(self._waiting) >= self._max_queued:
            raise Overloaded(
                f"the server is at its limit of queued {self._item_kind}",
                remedy="try again in a moment",
            )
        future: asyncio.Future[Row] = asyncio.get_running_loop().create_future()
        labels = self._find_request_labels()
        waiter = _Waiter(item, future, deadline, time.perf_counter(), labels)
        self._put(future if request is None else request, waiter)
        return await future

    async def label(self, embeddings: Embeddings, *, deadline: float) -> None:
        """See `Dispatcher.label`. Rows wait with the items, and are labeled with their embeddings.

        Does nothing if the queue lacks room for all rows.
        """
        labels = self._find_request_labels()
        if labels is None:
            return
        rows = [row for row in embeddings if not labels.knows(row)]
        if not rows or len(self._waiting) + len(rows) > self._max_queued:
            return
        loop, now, request = asyncio.get_running_loop(), time.perf_counter(), object()
        futures: list[asyncio.Future[Row]] = [loop.create_future() for _ in rows]
        for row, future in zip(rows, futures, strict=True):
            self._put(request, _Waiter(row, future, deadline, now, labels, is_row=True))
        with contextlib.suppress(MlcdError, TimeoutError):  # the server finds these labels itself
            async with asyncio.timeout_at(deadline):
                await asyncio.gather(*futures)

    def _put(self, request: object, waiter: _Waiter) -> None:
        self._waiting.put(request, waiter)
        self._changed.set()

    def _find_request_labels(self) -> EngineLabels | None:
        """Returns the labels that the current request needs, if the engine finds such."""
        labels = find_requested_labels()
        if labels is None or labels.centers != self._engine.labels_of or labels.top > MOST_LABELS:
            return None
        return labels

    async def _run(self) -> None:
        while True:
            await self._wait_until_due()
            await self._engine.wait_up()
            if batch := self._take_batch():
                task = asyncio.create_task(self._infer(batch))
                self._at_engine.add(task)
                task.add_done_callback(self._forget_task)

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        self._at_engine.discard(task)
        self._changed.set()

    async def _wait_until_due(self) -> None:
        """Returns when a batch may be sent: any batch to an idle engine, a full batch ahead of its
        turn.
        """
        while True:
            self._changed.clear()
            if self._waiting and not self._at_engine:
                await self._gather()
                return
            if len(self._waiting) >= self._max_batch and len(self._at_engine) < NUM_SLOTS:
                return
            await self._changed.wait()

    async def _gather(self) -> None:
        """Waits up to MAX_BATCH_DELAY_S for expected items to join the batch."""
        deadline = time.perf_counter() + MAX_BATCH_DELAY_S
        await asyncio.sleep(0)
        while (
            self._num_expected
            and len(self._waiting) < self._max_batch
            and time.perf_counter() < deadline
        ):
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), deadline - time.perf_counter())

    def _take_batch(self) -> list[_Waiter]:
        """Takes up to max_batch waiters; drops those past their deadline or without a client."""
        now = asyncio.get_running_loop().time()
        batch: list[_Waiter] = []
        while self._waiting and len(batch) < self._max_batch:
            waiter = self._waiting.take()
            if waiter.deadline <= now:
                self._metrics.count_dropped("deadline")
                _fail([waiter], DeadlineExceeded("the time for a request has passed"))
            elif waiter.future.done():
                self._metrics.count_dropped("client_gone")
            else:
                batch.append(waiter)
        return batch

    async def _infer(self, batch: list[_Waiter]) -> None:
        sent = time.perf_counter()
        batch.sort(key=lambda waiter: waiter.is_row)
        sent_batch = EngineBatch(
            [waiter.item for waiter in batch if not waiter.is_row],
            [waiter.item for waiter in batch if waiter.is_row],
            max(waiter.top for waiter in batch),
        )
        try:
            inference = await self._engine.encode(sent_batch)
        except asyncio.CancelledError:
            _fail(batch, Unavailable("the server is stopping"))
            raise
        except MlcdError as error:
            _fail(batch, error)
        else:
            self._answer(batch, len(sent_batch.items), inference, time.perf_counter() - sent)

    def _answer(
        self, batch: list[_Waiter], num_items: int, inference: Inference, at_engine_s: float
    ) -> None:
        # A batch that was sent ahead also waited at the engine.
        started = time.perf_counter() - min(inference.seconds, at_engine_s)
        if num_items:
            self._metrics.batch(num_items, inference.seconds, started - batch[0].enqueued)
        for waiter, embedding, label_ids in zip(
            batch, inference.rows, inference.label_ids, strict=True
        ):
            if waiter.labels is not None:
                waiter.labels.add(embedding, label_ids)
            if not waiter.future.done():
                waiter.future.set_result(
                    Row(embedding, started - waiter.enqueued, inference.seconds, started)
                )


def _fail(waiters: list[_Waiter], error: MlcdError) -> None:
    for waiter in waiters:
        if not waiter.future.done():
            waiter.future.set_exception(error)
