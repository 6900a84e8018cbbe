"""One process of the engine, from its start to its end."""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mlcd import errors
from mlcd.errors import MlcdError, Unavailable
from mlcd.types import Embeddings
from service.host.children import start_child
from service.inference.engine.slots import NUM_SLOTS, Slots
from service.inference.served import Opening, ServedEncoder
from service.timings import ENGINE_END_S


@dataclass(frozen=True)
class Inference:
    """The result of one batch. rows: [N, D]. seconds: the engine's own time."""

    rows: Embeddings
    seconds: float


class EngineFailed(Unavailable):
    """The engine raised an error, and its process lives."""


class EngineProcess:
    """A running engine process, made by `open`.

    Batches are encoded in the order of their calls, at most NUM_SLOTS at a time.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, served: ServedEncoder, slots: Slots
    ) -> None:
        self.served = served
        self.pid = process.pid
        # Called before any waiter hears of the end: queued images must not go to a dead process.
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
    async def open(cls, opening: Opening) -> Self:
        """Starts the process. Raises what opening the encoder raised.

        Raises Unavailable where the process ended without a message.
        """
        descriptor = os.memfd_create("mlcd-batches")
        try:
            process = await start_child(
                "service.inference.engine.worker", descriptor, descriptors=(descriptor,)
            )
            try:
                served = await _opened(process, opening)
                slots = Slots(
                    descriptor,
                    max_batch=opening.max_batch,
                    crop=served.preprocess.crop,
                    dimension=served.dimension,
                )
            except BaseException:
                await _end(process, 0.0)
                raise
        finally:
            os.close(descriptor)
        return cls(process, served, slots)

    @property
    def running_s(self) -> float:
        """The seconds that the current batch has been running; 0 while the engine is idle."""
        return 0.0 if self._started is None else asyncio.get_running_loop().time() - self._started

    async def encode(self, images: Sequence[NDArray[np.uint8]], *, limit_s: float) -> Inference:
        """Encodes a batch of at most max_batch images, uint8 [3, crop, crop].

        limit_s: from the start of the batch; the process is killed when a batch takes longer.
        Raises EngineFailed where the engine raised, Unavailable where the process ended.
        """
        slot = await self._free.get()
        if self._reader.done():
            self._free.put_nowait(slot)
            raise _gone()
        np.stack(images, out=self._slots.pixels[slot, : len(images)])
        loop = asyncio.get_running_loop()
        before, done = self._latest, loop.create_future()
        self._running[slot] = self._latest = done
        self._started = self._started or loop.time()
        self._send({"slot": slot, "num": len(images)})
        try:
            if before is not None:
                await asyncio.wait([before])
            async with asyncio.timeout(limit_s):
                seconds = await done
            return Inference(self._slots.rows[slot, : len(images)].copy(), seconds)
        except TimeoutError:
            self.kill()
            raise Unavailable(
                f"the engine did not answer within {limit_s:.0f} s and is started again"
            ) from None
        finally:
            self._free.put_nowait(slot)

    def kill(self) -> None:
        self.on_end()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def ended(self) -> int:
        """Waits for the process's end, and returns its exit status, negative for a signal."""
        await asyncio.wait([self._reader])
        return await self._process.wait()

    async def close(self) -> None:
        """Ends the process, by force where it does not end in ENGINE_END_S."""
        await _end(self._process, ENGINE_END_S)
        await self._reader

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._settle(json.loads(line))
        finally:
            self.on_end()
            self._started = None
            for done in self._running.values():
                _fail(done, _gone())

    def _settle(self, message: dict[str, Any]) -> None:
        done = self._running.pop(message["slot"])
        self._started = asyncio.get_running_loop().time() if self._running else None
        if "error" in message:
            _fail(done, EngineFailed("the engine failed", remedy="try again in a moment"))
        elif not done.done():
            done.set_result(message["seconds"])


async def _opened(process: asyncio.subprocess.Process, opening: Opening) -> ServedEncoder:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(opening.to_json().encode() + b"\n")
    line = await process.stdout.readline()
    if not line:
        raise Unavailable(
            "the engine's process ended while it opened the model", remedy="its log says why"
        )
    message = json.loads(line)
    if "error" in message:
        kind: type[MlcdError] = getattr(errors, message["error"], MlcdError)
        raise kind(message["message"], remedy=message["remedy"])
    return ServedEncoder.from_dict(message["served"])


async def _end(process: asyncio.subprocess.Process, patience_s: float) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(patience_s):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _gone() -> Unavailable:
    return Unavailable(
        "the engine's process ended and is started again", remedy="try again in a moment"
    )


def _fail(done: "asyncio.Future[float]", error: MlcdError) -> None:
    if not done.done():
        done.set_exception(error)
        done.exception()  # else asyncio warns where nobody waits for it any more
