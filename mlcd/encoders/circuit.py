"""A circuit breaker for a remote server: one watcher checks the server, and calls to a dead server
fail within microseconds.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from mlcd.errors import MlcdError, Unavailable

_log = logging.getLogger("mlcd.encoders")
_INTERVAL_S: Final = 0.25
_Answer = TypeVar("_Answer")


class Circuit:
    """A circuit that is closed while the server answers. When it opens, calls in flight and new
    calls fail immediately with the reason.

    Only the watcher opens and closes it: it calls `check` every quarter of a second and after a
    suspicion, so no caller's request serves as a probe. It belongs to one event loop.

    The cache's circuit (`mlcd.service.inference.cache.redis_circuit`) differs: requests work
    without a cache, so nothing watches a working cache, and its failure ends no call.
    """

    def __init__(self, check: Callable[[bool], Awaitable[None]]) -> None:
        """check: raises an MlcdError if the server cannot serve; its argument tells whether a call
        raised a suspicion.
        """
        self._check = check
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._cancelled: dict[asyncio.Task[Any], MlcdError] = {}
        self._suspicion = asyncio.Event()
        self._fault: MlcdError | None = None
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to watch a server, which must have answered just before."""
        self._watcher = asyncio.create_task(self._watch(), name="circuit-watcher")
        self._watcher.add_done_callback(self._end)

    @property
    def fault(self) -> MlcdError | None:
        """Returns why the circuit is open; None if it is closed."""
        return self._fault

    def require(self) -> None:
        """Raises Unavailable if the circuit is open."""
        if self._fault is not None:
            raise _unavailable(self._fault)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def suspect(self) -> None:
        """Requests an immediate check, after a call failed as if the server were down."""
        self._suspicion.set()

    async def call(self, answer: Awaitable[_Answer]) -> _Answer:
        """Awaits an answer; raises Unavailable when the circuit opens meanwhile.

        The current task must belong to the caller, because an opening circuit cancels it.
        """
        task = asyncio.current_task()
        assert task is not None
        num_cancellations = task.cancelling()
        self._in_flight.add(task)
        try:
            return await answer
        except asyncio.CancelledError:
            # A cancellation by the circuit becomes an error of the call; a cancellation by the
            # caller propagates. asyncio.timeout distinguishes them in the same way.
            if task in self._cancelled and task.uncancel() <= num_cancellations:
                raise _unavailable(self._cancelled[task]) from None
            raise
        finally:
            self._in_flight.discard(task)
            self._cancelled.pop(task, None)

    async def close(self, reason: str) -> None:
        """Ends the watcher; calls in flight and all later calls fail with `reason`."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        self._fault = Unavailable(reason)
        self._cancel_calls(self._fault)
        await asyncio.sleep(0)  # lets the calls end before the caller closes their connection

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL_S):
                    await self._suspicion.wait()
            suspected = self._suspicion.is_set()
            self._suspicion.clear()
            try:
                await self._check(suspected)
            except MlcdError as fault:
                if self._fault is None:
                    _log.warning("circuit opened: %s", fault)
                self._fault = fault
                self._cancel_calls(fault)
            else:
                if self._fault is not None:
                    _log.warning("circuit closed: the server answers again")
                self._fault = None

    def _end(self, watcher: asyncio.Task[None]) -> None:
        """Opens the circuit, because without a watcher the server's state is unknown."""
        if not watcher.cancelled():
            _log.error("the watcher of a circuit failed", exc_info=watcher.exception())
            self._fault = Unavailable(
                "the watcher of the server failed", remedy="restart this service"
            )

    def _cancel_calls(self, fault: MlcdError) -> None:
        for task in self._in_flight - self._cancelled.keys():
            self._cancelled[task] = fault
            task.cancel()


def _unavailable(fault: MlcdError) -> Unavailable:
    return Unavailable(fault.message, remedy=fault.remedy)
