"""Models beside the server's own: opened at their first use, and closed when they are idle.

All of them together stay within a budget of memory. Before a model is opened, its memory is
estimated from its files; afterwards it is the resident memory of its engines' processes. To make
room, models without requests are closed, the longest unused first.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from mlcd.errors import MlcdError, Overloaded, Unavailable
from mlcd.service.inference.admission import Admission
from mlcd.service.inference.model import ServedModel
from mlcd.service.telemetry.metrics import Metrics
from mlcd.service.timings import MODEL_RETRY_S, MODELS_POLL_S

_log = logging.getLogger("mlcd.service")
_AGAIN: Final = "try again in a moment"


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


@dataclass
class _Slot:
    """One of the models. num_bytes: memory that is reserved for it. last_used: loop time."""

    name: str
    opened: OpenedModel | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    opening: "asyncio.Task[None] | None" = None
    num_bytes: int = 0
    last_used: float = 0.0
    error: MlcdError | None = None
    retry_at: float = 0.0

    @property
    def is_idle(self) -> bool:
        return self.opened is not None and not self.opened.model.requests.num


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
        # one at a time, so that the models that are being opened count in the budget
        self._one_opening = asyncio.Lock()

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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        while (opened := slot.opened) is None:
            if slot.opening is None:
                if slot.error is not None and loop.time() < slot.retry_at:
                    raise slot.error
                slot.opening = asyncio.create_task(self._open(slot), name=f"open {name}")
            done, _ = await asyncio.wait({slot.opening}, timeout=deadline - loop.time())
            if not done:
                raise Unavailable(f"the model {name} is being opened", remedy=_AGAIN)
            if slot.error is not None:
                raise slot.error
        opened.model.requests.begin()

        def end() -> None:
            opened.model.requests.end()
            slot.last_used = loop.time()

        return opened, end

    async def _open(self, slot: _Slot) -> None:
        """Opens a model; keeps the error for the requests that wait, and for MODEL_RETRY_S."""
        slot.error = None
        try:
            async with self._one_opening:
                slot.num_bytes = await self._make_room(slot)
                slot.opened = await slot.stack.enter_async_context(self._opener.open(slot.name))
                slot.num_bytes = slot.opened.count_bytes() or slot.num_bytes
        except MlcdError as error:
            _log.error("the model %s cannot be opened: %s", slot.name, error)
            slot.error = error
            # A full budget may have room at the next request.
            wait_s = 0.0 if isinstance(error, Overloaded) else MODEL_RETRY_S
            slot.retry_at = asyncio.get_running_loop().time() + wait_s
        finally:
            slot.last_used = asyncio.get_running_loop().time()
            slot.opening = None
            if slot.opened is None:
                slot.num_bytes = 0
                await slot.stack.aclose()

    async def _make_room(self, slot: _Slot) -> int:
        """Closes idle models until a model fits, and returns its estimated bytes.

        Raises Unavailable if it cannot fit at all, Overloaded while the others are in use.
        """
        num_bytes = await self._opener.estimate_bytes(slot.name)
        if num_bytes > self._memory_bytes:
            raise Unavailable(
                f"the model {slot.name} needs about {num_bytes >> 20} MiB, and all models may have"
                f" {self._memory_bytes >> 20}",
                remedy="ask the operator to raise MLCD_MODELS_MEMORY_BYTES",
            )
        while sum(each.num_bytes for each in self._slots.values()) + num_bytes > self._memory_bytes:
            idle = [each for each in self._slots.values() if each.is_idle]
            if not idle:
                raise Overloaded("other models use the memory for models", remedy=_AGAIN)
            await self._close(min(idle, key=lambda each: each.last_used))
        return num_bytes

    async def _close(self, slot: _Slot) -> None:
        """Closes a model without requests; new requests open it again."""
        _log.info("the model %s is closed: it is idle", slot.name)
        stack, slot.stack, slot.opened = slot.stack, AsyncExitStack(), None
        await stack.aclose()
        slot.num_bytes = 0

    async def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(MODELS_POLL_S, self._idle_s))
            for slot in self._slots.values():
                if slot.is_idle and loop.time() - slot.last_used >= self._idle_s:
                    async with self._one_opening:
                        if slot.is_idle:
                            await self._close(slot)
                elif slot.opened is not None:
                    slot.num_bytes = slot.opened.count_bytes() or slot.num_bytes
