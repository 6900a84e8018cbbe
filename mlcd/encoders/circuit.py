"""A circuit breaker for a remote server: one watcher judges it, and a dead server costs callers
microseconds.
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
    """A circuit that is closed while the server answers. While it is open, calls are refused at
    once, and those in flight end with the reason.

    Only the watcher opens and closes it, by `check`, every quarter of a second and whenever a call
    raised a suspicion: no caller's request is spent on finding out. It belongs to one event loop.

    The cache's circuit (`mlcd.service.inference.cache.redis_circuit`) is of another kind. A cache
    that fails is left out and not missed, so nothing watches it while it works, and no call ends
    because of it.
    """

    def __init__(self, check: Callable[[bool], Awaitable[None]]) -> None:
        """check: raises an MlcdError where the server cannot serve; its argument is True where a
        call raised a suspicion.
        """
        self._check = check
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._cut: dict[asyncio.Task[Any], MlcdError] = {}
        self._suspicion = asyncio.Event()
        self._fault: MlcdError | None = None
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to watch a server that was just seen to serve."""
        self._watcher = asyncio.create_task(self._watch(), name="circuit-watcher")
        self._watcher.add_done_callback(self._end)

    @property
    def fault(self) -> MlcdError | None:
        """Returns why the circuit is open; None where it is closed."""
        return self._fault

    def require(self) -> None:
        """Raises Unavailable where the circuit is open."""
        if self._fault is not None:
            raise _unavailable(self._fault)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def suspect(self) -> None:
        """Requests a check at once, after a call that failed as if the server were down."""
        self._suspicion.set()

    async def call(self, answer: Awaitable[_Answer]) -> _Answer:
        """Returns the answer, for a task of the caller's own; raises Unavailable when the circuit
        opens meanwhile.
        """
        task = asyncio.current_task()
        assert task is not None
        already = task.cancelling()
        self._in_flight.add(task)
        try:
            return await answer
        except asyncio.CancelledError:
            # A cancellation by the circuit becomes an error of the call; the caller's own
            # continues. asyncio.timeout distinguishes them in the same way.
            if task in self._cut and task.uncancel() <= already:
                raise _unavailable(self._cut[task]) from None
            raise
        finally:
            self._in_flight.discard(task)
            self._cut.pop(task, None)

    async def close(self, reason: str) -> None:
        """Ends the watcher, and the calls in flight with `reason`, which all later
        calls get too.
        """
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        self._fault = Unavailable(reason)
        self._cut_calls(self._fault)
        await asyncio.sleep(0)  # lets them end before the caller closes what they use

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
                self._cut_calls(fault)
            else:
                if self._fault is not None:
                    _log.warning("circuit closed: the server answers again")
                self._fault = None

    def _end(self, watcher: asyncio.Task[None]) -> None:
        """Opens the circuit, because without a watcher the server cannot be known to be up."""
        if not watcher.cancelled():
            _log.error("the watcher of a circuit failed", exc_info=watcher.exception())
            self._fault = Unavailable(
                "the server is not watched any more", remedy="start this service again"
            )

    def _cut_calls(self, fault: MlcdError) -> None:
        for task in self._in_flight - self._cut.keys():
            self._cut[task] = fault
            task.cancel()


def _unavailable(fault: MlcdError) -> Unavailable:
    return Unavailable(fault.message, remedy=fault.remedy)
