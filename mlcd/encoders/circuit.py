"""A circuit breaker for a server elsewhere: one watcher judges, and a dead server costs its callers microseconds."""

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
    """Closed while the server answers; open, calls are refused at once and those in flight end with the reason.

    Only the watcher opens and closes it, by `check`, every quarter of a second and whenever a call raised a suspicion:
    no caller's request is spent on finding out. One event loop.

    The cache's (`service.inference.cache.circuit`) is another kind: a cache is left out when it fails and never missed,
    so nobody watches it while it works, and no call is ended for its sake.
    """

    def __init__(self, check: Callable[[bool], Awaitable[None]]) -> None:
        """check: raises an MlcdError where the server cannot serve; given True where a call raised a suspicion."""
        self._check = check
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._cut: dict[asyncio.Task[Any], MlcdError] = {}
        self._suspicion = asyncio.Event()
        self._fault: MlcdError | None = None
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch a server that was just seen to serve."""
        self._watcher = asyncio.create_task(self._watch(), name="circuit-watcher")
        self._watcher.add_done_callback(self._ended)

    @property
    def fault(self) -> MlcdError | None:
        """Why the circuit is open; None where it is closed."""
        return self._fault

    def require(self) -> None:
        """Raise Unavailable where the circuit is open."""
        if self._fault is not None:
            raise _unavailable(self._fault)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def suspect(self) -> None:
        """A call failed as it would if the server were down: look at once."""
        self._suspicion.set()

    async def call(self, answer: Awaitable[_Answer]) -> _Answer:
        """The answer; raises Unavailable when the circuit opens meanwhile. For a task of the caller's own."""
        task = asyncio.current_task()
        assert task is not None
        already = task.cancelling()
        self._in_flight.add(task)
        try:
            return await answer
        except asyncio.CancelledError:
            # Ours becomes an error of the caller's call; the caller's own goes on. As asyncio.timeout tells them apart.
            if task in self._cut and task.uncancel() <= already:
                raise _unavailable(self._cut[task]) from None
            raise
        finally:
            self._in_flight.discard(task)
            self._cut.pop(task, None)

    async def close(self, reason: str) -> None:
        """End the watcher, and the calls in flight with `reason`; all later ones are refused with it."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        self._fault = Unavailable(reason)
        self._cut_calls(self._fault)
        await asyncio.sleep(0)  # let them go, before the caller closes what they use

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

    def _ended(self, watcher: asyncio.Task[None]) -> None:
        """Nobody watches any more: what cannot be known to be up is not up."""
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
