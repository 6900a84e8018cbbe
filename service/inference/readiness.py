"""The readiness of a server: it is not stopping, its engine is up, an inference succeeded."""

import asyncio
import contextlib

import numpy as np

from mlcd.errors import MlcdError
from service.inference.contract import Dispatcher, Engine
from service.timings import READY_FRESH_S


class Readiness:
    """The answer to probes: however many come, one inference is tried at a time, two a second."""

    def __init__(self, engine: Engine, dispatcher: Dispatcher) -> None:
        self._engine, self._dispatcher = engine, dispatcher
        self._trial: asyncio.Task[None] | None = None
        self._tried = -np.inf
        self.draining = False

    async def check(self) -> bool:
        """Tells whether the server is ready.

        It answers within the time after which an inference is in doubt: 0.8 s, or three times the
        largest batch.
        """
        if self.draining or not self._engine.up or self._engine.overdue:
            return False
        if self._age > READY_FRESH_S or self._engine.failing:
            await self._try()
        return (
            not self._engine.failing
            and self._engine.up
            and self._age <= READY_FRESH_S + self._engine.overdue_s
        )

    @property
    def _age(self) -> float:
        return asyncio.get_running_loop().time() - self._engine.last_success

    async def _try(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._trial is None or self._trial.done():
            if now - self._tried < READY_FRESH_S:
                return
            self._tried = now
            self._trial = asyncio.create_task(self._infer(), name="readiness-trial")
        await asyncio.wait([self._trial], timeout=self._engine.overdue_s)

    async def _infer(self) -> None:
        crop = self._engine.served.preprocess.crop
        with contextlib.suppress(MlcdError):
            await self._dispatcher.encode(np.zeros((3, crop, crop), np.uint8))
