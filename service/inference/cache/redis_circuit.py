"""A circuit breaker for the cache's Redis: while Redis does not answer, requests skip it."""

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
# Consecutive failures that open the circuit: a single failure says little, but each failure costs a
# request its timeout.
_MAX_FAILURES: Final = 3


class RedisCircuit:
    """The state of Redis: closed while it answers. While open, only a recovery task sends requests.

    The circuit of an engine (`mlcd.encoders.circuit`) differs: requests fail without an engine, so
    the engine is always watched, and waiting requests get the reason for an open circuit.
    """

    def __init__(
        self, answers: Callable[[], Awaitable[bool]], on_change: Callable[[bool], None]
    ) -> None:
        """answers: tells, within its own timeout, whether Redis answers. on_change: called with
        True when the circuit closes and with False when it opens.
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
        _log.warning("the cache's Redis %s: serving without it until it recovers", reason)
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
