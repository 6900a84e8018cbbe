"""Checks the readiness of a server: it is not stopping, its engines are up, inferences succeed."""

import asyncio
import contextlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import MlcdError
from mlcd.service.inference.contract import Dispatcher, Engine
from mlcd.service.timings import READY_FRESH_S


class ReadinessProbe:
    """The probe of one engine: at most one trial inference at a time, and two per second."""

    def __init__(self, engine: Engine, dispatcher: Dispatcher, item: NDArray[Any]) -> None:
        """item: an item that the engine can encode."""
        self._engine, self._dispatcher, self._item = engine, dispatcher, item
        self._trial: asyncio.Task[None] | None = None
        self._last_trial = -np.inf

    async def check(self) -> bool:
        """Tells whether the engine is up and an inference succeeded recently."""
        if not self._engine.up or self._engine.overdue:
            return False
        if self._age > READY_FRESH_S or self._engine.failing:
            await self._try_inference()
        return (
            not self._engine.failing
            and self._engine.up
            and self._age <= READY_FRESH_S + self._engine.overdue_s
        )

    @property
    def _age(self) -> float:
        return asyncio.get_running_loop().time() - self._engine.last_success

    async def _try_inference(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._trial is None or self._trial.done():
            if now - self._last_trial < READY_FRESH_S:
                return
            self._last_trial = now
            self._trial = asyncio.create_task(self._infer(), name="readiness-trial")
        await asyncio.wait([self._trial], timeout=self._engine.overdue_s)

    async def _infer(self) -> None:
        with contextlib.suppress(MlcdError):
            await self._dispatcher.encode(self._item)


class Readiness:
    """The readiness of the server, cheap for any number of requests."""

    def __init__(self, *probes: ReadinessProbe) -> None:
        """probes: the probe of each engine; the server is ready when all of them are."""
        self._probes = probes
        self.draining = False

    async def check(self) -> bool:
        """Tells whether the server is ready.

        Takes at most the time after which an inference counts as overdue: 0.8 s, or three times the
        duration of the largest batch.
        """
        if self.draining:
            return False
        return all(await asyncio.gather(*(probe.check() for probe in self._probes)))
