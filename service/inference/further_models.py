"""Models beside the server's own: opened at their first use, and closed when they are idle.

All of them together stay within a budget of memory. Before a model is first opened, its memory is
estimated from its files; afterwards it is the resident memory of its engines' processes. To make
room, models without requests are closed, the longest unused first. A model that exceeds the budget
once it is open, while the others are in use, is closed again.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import Context
from dataclasses import dataclass, field
from typing import Final, Self

from mlcd.errors import MlcdError, Unavailable
from mlcd.service.inference.admission import Admission
from mlcd.service.inference.model import ServedModel
from mlcd.service.telemetry.metrics import Metrics
from mlcd.service.timings import MODEL_OPEN_S, MODEL_RETRY_S, MODELS_POLL_S

_log = logging.getLogger("mlcd.service")
_AGAIN: Final = "try again in a moment"
_LOG: Final = "ask the operator: the server's log says why"


@dataclass(frozen=True)
class OpenedModel:
    """An open model with its own admission and metrics.

    count_bytes: returns the resident memory of its engines' processes, 0 if it is unknown.
    """

    model: ServedModel
    admission: Admission
    metrics: Metrics
    count_bytes: Callable[[], int]


@dataclass(frozen=True)
class ModelOpener:
    """Opens models. open: opens the model of a name. estimate_bytes: returns the memory that it
    will need; both may take minutes for weights that have to be exported first.
    """

    open: Callable[[str], AbstractAsyncContextManager[OpenedModel]]
    estimate_bytes: Callable[[str], Awaitable[int]]


class _NotOpen(Unavailable):
    """The latest opening of a model failed."""

    def __init__(self, error: Unavailable, *, retry_after_s: int) -> None:
        super().__init__(error.message, remedy=error.remedy)
        self.headers = {"Retry-After": str(retry_after_s)}


class _NoRoom(Unavailable):
    """The models in use leave too little memory for another."""


@dataclass
class _Slot:
    """One of the models.

    num_bytes: memory that is reserved for it. measured_bytes: memory that it took when it was
    opened last; 0 if unknown. num_waiting: requests that wait for its opening. last_used, retry_at:
    loop times. error: of the latest opening.
    """

    name: str
    opened: OpenedModel | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    opening: "asyncio.Task[None] | None" = None
    num_bytes: int = 0
    measured_bytes: int = 0
    num_waiting: int = 0
    last_used: float = 0.0
    error: Unavailable | None = None
    retry_at: float = 0.0

    @property
    def is_idle(self) -> bool:
        return (
            self.opened is not None and not self.opened.model.requests.num and not self.num_waiting
        )

    def new_error(self) -> Unavailable:
        """Returns a copy of `error`: a raised error keeps its request's frames in memory."""
        assert self.error is not None
        wait_s = self.retry_at - asyncio.get_running_loop().time()
        return _NotOpen(self.error, retry_after_s=max(1, math.ceil(wait_s)))


class FurtherModels:
    """The models by name. Use it as an async context manager, which closes them."""

    def __init__(
        self, names: Sequence[str], opener: ModelOpener, *, memory_bytes: int, idle_s: float
    ) -> None:
        """memory_bytes: budget of all models together. idle_s: seconds without requests after which
        a model is closed.
        """
        self._slots = {name: _Slot(name) for name in names}
        self._opener, self._memory_bytes, self._idle_s = opener, memory_bytes, idle_s
        # Held while memory is reserved, not while a model is opened: an opening that hangs must not
        # keep other models closed.
        self._reserving = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        return [*self._slots]

    def find_opened(self, name: str) -> OpenedModel | None:
        """Returns a model if it is open."""
        return self._slots[name].opened

    async def is_ready(self, name: str) -> bool:
        """Tells whether the model can answer, or can be opened as far as is known."""
        slot = self._slots[name]
        if slot.opened is None:
            return slot.error is None
        return await slot.opened.model.readiness.check()

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._close_idle(), name="idle-models")
        return self

    async def __aexit__(self, *_: object) -> None:
        openings = [slot.opening for slot in self._slots.values() if slot.opening is not None]
        for task in (self._watcher, *openings):
            task.cancel()
        await asyncio.gather(self._watcher, *openings, return_exceptions=True)
        for slot in self._slots.values():
            await slot.stack.aclose()

    async def begin(self, name: str, *, deadline: float) -> tuple[OpenedModel, Callable[[], None]]:
        """Returns the model for one request, and a function to call at the request's end.

        Opens the model if it is closed; concurrent requests wait for one opening, which goes on
        after their deadlines. deadline: by the loop's clock. Raises Unavailable while the model is
        being opened or if there is no memory, and the errors of opening it.
        """
        slot, loop = self._slots[name], asyncio.get_running_loop()
        slot.num_waiting += 1
        try:
            opened = await self._wait_open(slot, deadline)
            opened.model.requests.begin()
        finally:
            slot.num_waiting -= 1

        def end() -> None:
            opened.model.requests.end()
            slot.last_used = loop.time()

        return opened, end

    async def _wait_open(self, slot: _Slot, deadline: float) -> OpenedModel:
        loop = asyncio.get_running_loop()
        while (opened := slot.opened) is None:
            if slot.opening is None:
                if slot.error is not None and loop.time() < slot.retry_at:
                    raise slot.new_error()
                # In a new context, because the engines outlive this request.
                slot.opening = asyncio.create_task(
                    self._open(slot), name=f"open {slot.name}", context=Context()
                )
            done, _ = await asyncio.wait({slot.opening}, timeout=max(0.0, deadline - loop.time()))
            if not done:
                raise Unavailable(f"the model {slot.name} is being opened", remedy=_AGAIN)
            if slot.error is not None:
                raise slot.new_error()
        return opened

    async def _open(self, slot: _Slot) -> None:
        """Opens a model; keeps the error for the requests that wait, and for MODEL_RETRY_S."""
        loop, wait_s = asyncio.get_running_loop(), MODEL_RETRY_S
        slot.error = None
        try:
            async with asyncio.timeout(MODEL_OPEN_S):
                slot.opened = await self._open_within_budget(slot)
        except _NoRoom as error:  # the next request may find room
            slot.error, wait_s = error, 0.0
        except Exception as error:  # noqa: BLE001 - the requests that wait must hear of every error
            # Not the error's text, which may have a path of the server.
            _log.error("the model %s cannot be opened: %s", slot.name, _describe(error))
            slot.error = (
                error
                if isinstance(error, Unavailable)
                else Unavailable(f"the model {slot.name} cannot be opened", remedy=_LOG)
            )
        finally:
            slot.last_used = loop.time()
            slot.retry_at = loop.time() + wait_s
            try:
                if slot.opened is None:
                    stack, slot.stack = slot.stack, AsyncExitStack()
                    await stack.aclose()
                    slot.num_bytes = 0
            finally:
                slot.opening = None

    async def _open_within_budget(self, slot: _Slot) -> OpenedModel:
        """Opens a model, and returns it if its measured memory is within the budget, too."""
        num_bytes = slot.measured_bytes or await self._opener.estimate_bytes(slot.name)
        await self._reserve(slot, num_bytes)
        opened = await slot.stack.enter_async_context(self._opener.open(slot.name))
        if (measured_bytes := opened.count_bytes()) != 0:
            slot.measured_bytes = measured_bytes
            await self._reserve(slot, measured_bytes)
        return opened

    async def _reserve(self, slot: _Slot, num_bytes: int) -> None:
        """Reserves memory for a model; closes idle models until it fits.

        Raises Unavailable if it cannot fit at all, _NoRoom while the others are in use.
        """
        if num_bytes > self._memory_bytes:
            raise Unavailable(
                f"the model {slot.name} needs about {num_bytes >> 20} MiB, and all models may have"
                f" {self._memory_bytes >> 20}",
                remedy="ask the operator to raise MLCD_MODELS_MEMORY_BYTES",
            )
        async with self._reserving:
            slot.num_bytes = num_bytes
            if not await self._close_for_budget():
                raise _NoRoom("other models use the memory for models", remedy=_AGAIN)

    async def _close_for_budget(self) -> bool:
        """Closes idle models, the longest unused first, until the budget suffices.

        Returns whether it does. Call it with the lock.
        """
        while sum(slot.num_bytes for slot in self._slots.values()) > self._memory_bytes:
            idle = [slot for slot in self._slots.values() if slot.is_idle]
            if not idle:
                return False
            await self._close(min(idle, key=lambda slot: slot.last_used))
        return True

    async def _close(self, slot: _Slot) -> None:
        """Closes a model without requests; new requests open it again."""
        _log.info("the model %s is closed: it is idle", slot.name)
        stack, slot.stack, slot.opened = slot.stack, AsyncExitStack(), None
        try:
            await stack.aclose()
        finally:
            slot.num_bytes = 0

    async def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(MODELS_POLL_S, self._idle_s))
            async with self._reserving:
                for slot in self._slots.values():
                    if slot.opened is None:
                        continue
                    if slot.is_idle and loop.time() - slot.last_used >= self._idle_s:
                        await self._close(slot)
                    else:
                        slot.num_bytes = slot.opened.count_bytes() or slot.num_bytes
                await self._close_for_budget()


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, MlcdError) else type(error).__name__
