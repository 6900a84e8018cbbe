"""Runs one process of the engine, from its start to its end."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mlcd.child import Child, Message, to_line
from mlcd.errors import MlcdError, Unavailable
from mlcd.service.inference.engine.launched import LaunchedEngine, launch_engine
from mlcd.service.inference.engine.slots import NUM_SLOTS, Slots
from mlcd.service.inference.served import TOWERS, EngineOptions, ServedTower
from mlcd.service.timings import ENGINE_END_S
from mlcd.types import Embeddings


@dataclass(frozen=True)
class EngineBatch:
    """One batch: at most max_batch items and rows together.

    items: to encode, with the layout `ServedTower.item`. rows: embeddings [D] to label only. top:
    labels of each, at most MOST_LABELS and the number of centers.
    """

    items: Sequence[NDArray[Any]]
    rows: Sequence[NDArray[np.float32]] = ()
    top: int = 0

    def __len__(self) -> int:
        return len(self.items) + len(self.rows)


@dataclass(frozen=True)
class Inference:
    """The result of one batch, of its items and then of its rows.

    rows: [N, D]. seconds: time of the computation in the engine. label_ids: int32 [N, top], the
    nearest centers of each row, or -1 if the engine left them to the server.
    """

    rows: Embeddings
    seconds: float
    label_ids: NDArray[np.int32]


class EngineFailed(Unavailable):
    """The engine raised an error, and its process is still running."""


@dataclass(frozen=True)
class StartedEngine:
    """A process that is opening its encoder; `EngineProcess.open` waits for it."""

    options: EngineOptions
    launched: LaunchedEngine

    @property
    def launched_at(self) -> float:
        """The time of the launch, by time.perf_counter."""
        return self.launched.launched_at


def start_engine(options: EngineOptions, launched: LaunchedEngine | None = None) -> StartedEngine:
    """Orders a process to open an encoder. Needs no event loop.

    launched: process without an order; None launches one.
    """
    launched = launched or launch_engine()
    assert launched.process.stdin is not None
    order = {"descriptor": launched.descriptor, "options": options.to_dict()}
    with suppress(BrokenPipeError):  # the process has died, which `EngineProcess.open` reports
        launched.process.stdin.write(to_line(order))
    return StartedEngine(options, launched)


class EngineProcess:
    """A running engine process, made by `open`.

    Batches are encoded in the order of their calls, at most NUM_SLOTS at a time.
    """

    def __init__(self, process: Child, served: ServedTower, slots: Slots) -> None:
        self.served = served
        self.pid = process.pid
        # Called before any waiter gets an error, so that queued items do not go to a dead process.
        self.on_end: Callable[[], None] = lambda: None
        self._process, self._slots = process, slots
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(NUM_SLOTS):
            self._free.put_nowait(slot)
        self._running: dict[int, asyncio.Future[float]] = {}
        self._latest: asyncio.Future[float] | None = None
        self._started: float | None = None
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    @classmethod
    async def open(cls, started: StartedEngine) -> Self:
        """Waits until the encoder is open. Raises the errors of opening it, and Unavailable if the
        process ended without a message.
        """
        options = started.options
        try:
            process = await Child.of(started.launched.process)
            try:
                served = await _receive_served(process, options)
                slots = Slots(
                    started.launched.descriptor,
                    max_batch=options.max_batch,
                    item=served.item,
                    dimension=served.dimension,
                )
            except BaseException:
                await process.end()
                raise
        finally:
            os.close(started.launched.descriptor)
        return cls(process, served, slots)

    @property
    def running_s(self) -> float:
        """The seconds that the current batch has been running; 0 while the engine is idle."""
        return 0.0 if self._started is None else asyncio.get_running_loop().time() - self._started

    async def encode(self, batch: EngineBatch, *, limit_s: float) -> Inference:
        """Encodes and labels a batch.

        limit_s: seconds from the start of the batch after which the process is killed. Raises
        EngineFailed if the engine raised an error, and Unavailable if the process ended.
        """
        slot = await self._free.get()
        if self._reader.done():
            self._free.put_nowait(slot)
            raise _end_error()
        num, total = len(batch.items), len(batch)
        if batch.items:
            np.stack(batch.items, out=self._slots.items[slot, :num])
        if batch.rows:
            np.stack(batch.rows, out=self._slots.rows[slot, num:total])
        loop = asyncio.get_running_loop()
        previous, done = self._latest, loop.create_future()
        self._running[slot] = self._latest = done
        self._started = self._started or loop.time()
        order = {"slot": slot, "num": num, "rows": total - num, "top": batch.top}
        self._process.send(order)
        try:
            if previous is not None:
                await asyncio.wait([previous])
            async with asyncio.timeout(limit_s):
                seconds = await done
            label_ids = self._slots.label_ids[slot, :total, : batch.top].copy()
            return Inference(self._slots.rows[slot, :total].copy(), seconds, label_ids)
        except TimeoutError:
            self.kill()
            raise Unavailable(
                f"the engine did not answer within {limit_s:.0f} s and is restarting"
            ) from None
        finally:
            self._free.put_nowait(slot)

    def kill(self) -> None:
        self.on_end()
        self._process.signal(signal.SIGKILL)

    async def wait_for_end(self) -> int:
        """Waits for the process's end and returns its exit status, negative for a signal."""
        await asyncio.wait([self._reader])
        return await self._process.wait()

    async def close(self) -> None:
        """Ends the process; kills it after ENGINE_END_S."""
        await self._process.end(patience_s=ENGINE_END_S)
        await self._reader

    async def _read(self) -> None:
        try:
            while message := await self._process.receive():
                self._settle(message)
        finally:
            self.on_end()
            self._started = None
            for done in self._running.values():
                _fail(done, _end_error())

    def _settle(self, message: Message) -> None:
        done = self._running.pop(message["slot"])
        self._started = asyncio.get_running_loop().time() if self._running else None
        if "seconds" not in message:
            _fail(done, EngineFailed("the engine failed", remedy="try again in a moment"))
        elif not done.done():
            done.set_result(message["seconds"])


async def _receive_served(process: Child, options: EngineOptions) -> ServedTower:
    message = await process.receive()
    if message is None:
        raise Unavailable(
            "the engine's process ended while it opened the model", remedy="its log says why"
        )
    return TOWERS[options.tower].from_dict(message["served"])


def _end_error() -> Unavailable:
    return Unavailable(
        "the engine's process ended and is restarting", remedy="try again in a moment"
    )


def _fail(done: "asyncio.Future[float]", error: MlcdError) -> None:
    if not done.done():
        done.set_exception(error)
        done.exception()  # avoids asyncio's warning if nobody waits for it any more
