"""Supervises an engine's process, and replaces it if it dies, hangs or fails repeatedly."""

import asyncio
import contextlib
import logging
import time
from typing import Final, Protocol, Self

import numpy as np

from mlcd.backoff import Backoff
from mlcd.errors import ConfigInvalid, MlcdError, Unavailable
from mlcd.service.inference.contract import down
from mlcd.service.inference.engine.process import (
    EngineBatch,
    EngineFailed,
    EngineProcess,
    Inference,
    StartedEngine,
    start_engine,
)
from mlcd.service.inference.served import EngineOptions, ServedTower
from mlcd.service.telemetry.text_metrics import TowerMetrics
from mlcd.service.timings import (
    ENGINE_BACKOFF_S,
    ENGINE_MAX_BACKOFF_S,
    ENGINE_OPEN_S,
    ENGINE_OVERDUE_S,
    ENGINE_STEADY_S,
)

_log = logging.getLogger("mlcd.service")
# Consecutive failures after which the process is replaced: after a GPU fault, every inference of a
# process fails.
_MAX_FAILURES: Final = 3
# A batch or an opening hangs after this times its duration at start.
_HANG_FACTOR: Final = 10
# An inference is overdue after this times the largest batch's duration at start.
_OVERDUE_FACTOR: Final = 3


class BatchEngine(Protocol):
    """The part of an engine that the batcher uses."""

    @property
    def labels_of(self) -> str | None:
        """See `mlcd.service.inference.contract.Engine`."""
        ...

    async def wait_up(self) -> None: ...

    async def encode(self, batch: EngineBatch) -> Inference:
        """Encodes and labels a batch. Raises Unavailable as soon as the engine fails or ends."""
        ...


class SupervisedEngine:
    """An `Engine` and `BatchEngine` in a separate process.

    Use it as an async context manager, which opens the first process.
    """

    served: ServedTower

    def __init__(
        self,
        options: EngineOptions,
        *,
        batch_timeout_s: float,
        started: StartedEngine | None = None,
    ) -> None:
        """started: its first process; None starts one. batch_timeout_s: a batch hangs if it takes
        longer than this and longer than ten times the largest batch at start.
        """
        self._options, self._batch_timeout_s = options, batch_timeout_s
        self._started = started
        self._process: EngineProcess | None = None
        self._up = asyncio.Event()
        self._open_s = 0.0
        self._failures = 0
        self._restart_at = 0.0
        self._metrics: TowerMetrics | None = None
        self.last_success = -np.inf  # by the loop's clock

    async def __aenter__(self) -> Self:
        started = self._started or start_engine(self._options)
        self._process = await EngineProcess.open(started)
        self._process.on_end = self._up.clear
        self._open_s = time.perf_counter() - started.launched_at
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
        """Reports the engine's health and restarts in `metrics`."""
        self._metrics = metrics
        metrics.engine_up(lambda: self.up)

    @property
    def up(self) -> bool:
        return self._up.is_set()

    @property
    def labels_of(self) -> str | None:
        """See `Engine`; None while the engine is down or overdue."""
        if self._process is None or not self.up or self.overdue:
            return None
        return self._process.served.labels_of

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def failing(self) -> bool:
        """Tells whether the latest inference failed."""
        return self._failures > 0

    @property
    def overdue_s(self) -> float:
        """The seconds after which a running inference may be hanging."""
        return max(ENGINE_OVERDUE_S, _OVERDUE_FACTOR * self.served.longest_s)

    @property
    def overdue(self) -> bool:
        return self._process is not None and self._process.running_s > self.overdue_s

    @property
    def back_in_s(self) -> float:
        """The approximate seconds until an engine that is down is up again."""
        return max(0.0, self._restart_at - asyncio.get_running_loop().time()) + self._open_s

    async def wait_up(self) -> None:
        await self._up.wait()

    async def encode(self, batch: EngineBatch) -> Inference:
        process = self._process
        if process is None or not self.up:
            raise down()
        limit_s = max(self._batch_timeout_s, _HANG_FACTOR * self.served.longest_s)
        try:
            inference = await process.encode(batch, limit_s=limit_s)
        except EngineFailed:
            self._failures += 1
            if self._failures % _MAX_FAILURES == 0:
                _log.error("the engine failed %d times in a row and is restarting", _MAX_FAILURES)
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
            started_at = loop.time()
            status = await self._process.wait_for_end()
            self._up.clear()
            await self._process.close()
            self._process = None
            if loop.time() - started_at > ENGINE_STEADY_S:
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
        self._restart_at = asyncio.get_running_loop().time() + pause_s
        await asyncio.sleep(pause_s)
        try:
            async with asyncio.timeout(max(ENGINE_OPEN_S, _HANG_FACTOR * self._open_s)):
                process = await EngineProcess.open(start_engine(self._options))
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
