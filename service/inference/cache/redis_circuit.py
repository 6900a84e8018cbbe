"""A circuit breaker: it keeps requests away from a store that does not answer, until it does."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Final

from mlcd.backoff import Backoff
from mlcd.service.timings import CACHE_MAX_PAUSE_S, CACHE_PAUSE_S, CACHE_STEADY_S

_log = logging.getLogger("mlcd.service")
# Failures in a row that open the circuit: one alone says little, and each costs a request its
# timeout.
_MAX_FAILURES: Final = 3


class RedisCircuit:
    """The state of Redis: closed while it answers. While open, only a task of our own asks it.

    The circuit of an engine (`mlcd.encoders.circuit`) is another kind: requests fail without an
    engine, so it is watched all the time, and waiting requests get the reason why it is open.
    """

    def __init__(
        self, answers: Callable[[], Awaitable[bool]], on_change: Callable[[bool], None]
    ) -> None:
        """Takes the callbacks.

        answers: asks, within its own time limit, whether the store answers. on_change: is called
        with True when the circuit closes and with False when it opens.
        """
        self._answers, self._on_change = answers, on_change
        self._failures = 0
        self._backoff = Backoff(CACHE_PAUSE_S, CACHE_MAX_PAUSE_S)
        self._closed_at = -CACHE_STEADY_S
        self._recovery: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        return self._recovery is None

    def count_success(self) -> None:
        self._failures = 0

    def count_failure(self) -> None:
        self._failures += 1
        if self._failures >= _MAX_FAILURES:
            self.open()

    def open(self, reason: str = "does not answer") -> None:
        if not self.closed:
            return
        if time.monotonic() - self._closed_at > CACHE_STEADY_S:
            self._backoff.reset()
        _log.warning("the cache's Redis %s: served without it until that is over", reason)
        self._on_change(False)
        self._recovery = asyncio.create_task(
            self._recover(), name="cache-recovery", context=Context()
        )

    async def stop(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._recovery

    async def _recover(self) -> None:
        answers = False
        while not answers:
            await asyncio.sleep(self._backoff.next_s())
            answers = await self._answers()
        self._failures, self._closed_at, self._recovery = 0, time.monotonic(), None
        self._on_change(True)
        _log.warning("the cache's Redis is used again")
