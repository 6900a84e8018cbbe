"""The supervised engine: a process that dies, hangs or fails repeatedly is replaced."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mlcd.backoff import Backoff
from mlcd.errors import ConfigInvalid, MlcdError, Unavailable
from mlcd.service.inference.contract import down
from mlcd.service.inference.engine.process import (
    EngineFailed,
    EngineProcess,
    Inference,
    StartedEngine,
    start_engine,
)
from mlcd.service.inference.served import Opening, ServedTower
from mlcd.service.telemetry.text_metrics import TowerMetrics
from mlcd.service.timings import (
    ENGINE_BACKOFF_S,
    ENGINE_MAX_BACKOFF_S,
    ENGINE_OPEN_S,
    ENGINE_OVERDUE_S,
    ENGINE_STEADY_S,
)

_log = logging.getLogger("mlcd.service")
# After so many failures in a row the process is replaced: after a fault of a GPU every inference
# fails until then.
_MAX_FAILURES: Final = 3
_PATIENCE: Final = 10  # times the duration at start; a batch or an opening that takes longer hangs
_OVERDUE: Final = 3  # times the longest batch at start; an inference that takes longer is in doubt


class BatchEngine(Protocol):
    """The engine as the batcher sees it."""

    async def wait_up(self) -> None: ...

    async def encode(self, items: Sequence[NDArray[Any]]) -> Inference:
        """Encodes at most max_batch items, each of the layout that is served.

        Raises Unavailable at once where the engine fails or ends.
        """
        ...


class SupervisedEngine:
    """An `Engine` and `BatchEngine` in a process of its own.

    Use it as an async context manager, which opens the first process.
    """

    served: ServedTower
    labels_of = None

    def __init__(
        self, opening: Opening, *, batch_timeout_s: float, started: StartedEngine | None = None
    ) -> None:
        """Takes how to open the engine. started: its first process, where there is one already.

        batch_timeout_s: a batch hangs when it takes longer than this and than ten times the largest
        batch at start.
        """
        self._opening, self._batch_timeout_s = opening, batch_timeout_s
        self._started = started
        self._process: EngineProcess | None = None
        self._up = asyncio.Event()
        self._open_s = 0.0
        self._failures = 0
        self._back_at = 0.0
        self._metrics: TowerMetrics | None = None
        self.last_success = -np.inf  # by the loop's clock

    async def __aenter__(self) -> Self:
        started = self._started or start_engine(self._opening)
        self._process = await EngineProcess.open(started)
        self._process.on_end = self._up.clear
        self._open_s = time.perf_counter() - started.began
        self.served = self._process.served
        self.last_success = asyncio.get_running_loop().time()
        self._up.set()
        self._keeper = asyncio.create_task(self._keep(), name="engine-keeper")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeper
        self._up.clear()
        if self._process is not None:
            await self._process.close()

    def observe(self, metrics: TowerMetrics) -> None:
        """Connects the engine's health to `metrics`, which also count restarts."""
        self._metrics = metrics
        metrics.engine_up(lambda: self.up)

    @property
    def up(self) -> bool:
        return self._up.is_set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def failing(self) -> bool:
        """Tells whether the latest inference failed."""
        return self._failures > 0

    @property
    def overdue_s(self) -> float:
        """The seconds after which a running inference is in doubt."""
        return max(ENGINE_OVERDUE_S, _OVERDUE * self.served.longest_s)

    @property
    def overdue(self) -> bool:
        return self._process is not None and self._process.running_s > self.overdue_s

    @property
    def back_in_s(self) -> float:
        """The approximate seconds until an engine that is down is up again."""
        return max(0.0, self._back_at - asyncio.get_running_loop().time()) + self._open_s

    async def wait_up(self) -> None:
        await self._up.wait()

    async def encode(self, items: Sequence[NDArray[Any]]) -> Inference:
        process = self._process
        if process is None or not self.up:
            raise down()
        limit_s = max(self._batch_timeout_s, _PATIENCE * self.served.longest_s)
        try:
            inference = await process.encode(items, limit_s=limit_s)
        except EngineFailed:
            self._failures += 1
            if self._failures % _MAX_FAILURES == 0:
                _log.error(
                    "the engine failed %d times in a row and is started again", _MAX_FAILURES
                )
                process.kill()
            raise
        except Unavailable:
            self._failures += 1
            raise
        self._failures = 0
        self.last_success = asyncio.get_running_loop().time()
        return inference

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(ENGINE_BACKOFF_S, ENGINE_MAX_BACKOFF_S, at_once=True)
        while True:
            assert self._process is not None
            born = loop.time()
            status = await self._process.wait_for_end()
            self._up.clear()
            await self._process.close()
            self._process = None
            if loop.time() - born > ENGINE_STEADY_S:
                backoff.reset()
            pause_s = backoff.next_s()
            _log.error(
                "the engine's process ended with status %d; the next starts in %.1f s",
                status,
                pause_s,
            )
            while not await self._reopen(pause_s):
                pause_s = backoff.next_s()
            if self._metrics is not None:
                self._metrics.engine_restarted()
            self._failures = 0
            self.last_success = loop.time()
            self._up.set()

    async def _reopen(self, pause_s: float) -> bool:
        self._back_at = asyncio.get_running_loop().time() + pause_s
        await asyncio.sleep(pause_s)
        try:
            async with asyncio.timeout(max(ENGINE_OPEN_S, _PATIENCE * self._open_s)):
                process = await EngineProcess.open(start_engine(self._opening))
            if process.served.fingerprint != self.served.fingerprint:
                await process.close()
                raise ConfigInvalid(
                    "the model on disk was replaced since the start",
                    remedy="restart the server",
                )
        except (MlcdError, TimeoutError, OSError) as error:
            _log.error("the engine cannot be started: %s", error or type(error).__name__)
            return False
        process.on_end = self._up.clear
        self._process = process
        return True
