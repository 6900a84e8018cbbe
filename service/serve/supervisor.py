"""Supervises several server processes on one socket, each with its own engine.

It keeps them alive until a signal. Any free process accepts the next connection, so that the others
replace a process that is down. The first process starts before the others, so that an error of the
model is reported once and weights are exported once.
"""

import asyncio
import logging
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from mlcd.backoff import Backoff
from mlcd.child import STOPS, Child
from mlcd.errors import MlcdError, Unavailable
from mlcd.service.host.signals import FINISH, StopSignals
from mlcd.service.serve.server import Order, SettingsSources, bound_s
from mlcd.service.settings import Settings
from mlcd.service.timings import (
    SERVER_BACKOFF_S,
    SERVER_KILL_S,
    SERVER_MAX_BACKOFF_S,
    SERVER_OPEN_S,
    SERVER_STEADY_S,
)

_log = logging.getLogger("mlcd.service")


class Supervisor:
    """The server processes and their restarts. Call `run` once."""

    def __init__(
        self,
        settings: Settings,
        source: SettingsSources,
        listener: socket.socket,
        *,
        announce: Callable[[str], None],
    ) -> None:
        """announce: called with a description of the served model, once all processes serve it."""
        self._settings, self._source, self._listener = settings, source, listener
        self._announce = announce
        self._processes: dict[int, Child] = {}
        self._identity: str | None = None
        self._stopping = asyncio.Event()
        self._signals = StopSignals(last=self._kill)

    async def run(self) -> int:
        """Serves until a signal and returns the exit status: 0 if every process ended in time.

        Raises the error of the first process if it cannot open the model.
        """
        loop = asyncio.get_running_loop()
        for number in STOPS:
            loop.add_signal_handler(number, self._stop, number)
        with tempfile.TemporaryDirectory(prefix="mlcd-metrics-") as multiprocess_dir:
            try:
                return await self._supervise(Path(multiprocess_dir))
            finally:
                await self._end()

    async def _supervise(self, multiprocess_dir: Path) -> int:
        served = await self._start(0, multiprocess_dir)
        if served is not None:
            other_slots = range(1, self._settings.processes)
            await asyncio.gather(*(self._start(slot, multiprocess_dir) for slot in other_slots))
        if served is not None and not self._stopping.is_set():
            self._announce(served)
        statuses = await asyncio.gather(
            *(self._keep(slot, multiprocess_dir) for slot in self._processes)
        )
        return max(map(abs, statuses), default=0) and 1

    async def _keep(self, slot: int, multiprocess_dir: Path) -> int:
        """Replaces the process whenever it ends early; returns its exit status at the shutdown."""
        backoff = Backoff(SERVER_BACKOFF_S, SERVER_MAX_BACKOFF_S, at_once=True)
        while True:
            started_at = time.monotonic()
            status = await self._processes[slot].wait()
            mark_process_dead(slot, str(multiprocess_dir))
            if self._stopping.is_set():
                # A process that is just starting has no handler yet, so FINISH itself ends it.
                return 0 if status == -FINISH else status
            if time.monotonic() - started_at > SERVER_STEADY_S:
                backoff.reset()
            pause_s = backoff.next_s()
            _log.error(
                "server process %d ended with status %d; the next starts in %.1f s",
                slot,
                status,
                pause_s,
            )
            while not await self._restart(slot, multiprocess_dir, pause_s):
                if self._stopping.is_set():
                    return 0
                pause_s = backoff.next_s()

    async def _restart(self, slot: int, multiprocess_dir: Path, pause_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()
        if self._stopping.is_set():
            return False
        try:
            async with asyncio.timeout(SERVER_OPEN_S):
                return await self._start(slot, multiprocess_dir) is not None
        except TimeoutError:
            _log.error("server process %d did not open within %.0f s", slot, SERVER_OPEN_S)
            self._processes[slot].signal(signal.SIGKILL)
        except (MlcdError, OSError) as error:  # the system may have no process or memory left
            _log.error("server process %d cannot be started: %s", slot, error)
        return False

    async def _start(self, slot: int, multiprocess_dir: Path) -> str | None:
        """Starts a process and returns the description of its model; None during a shutdown.

        Raises the errors of opening the model.
        """
        process = await Child.start(
            "mlcd.service.serve.server", descriptors=(self._listener.fileno(),)
        )
        self._processes[slot] = process
        if self._stopping.is_set():  # a signal arrived while the process was being started
            process.signal(FINISH)
        order = Order(
            self._source, self._listener.fileno(), slot, str(multiprocess_dir), self._identity
        )
        process.send(asdict(order))
        try:
            message = await process.receive()
        except MlcdError:
            if not self._stopping.is_set():
                raise
        if self._stopping.is_set():
            return None
        if message is None:
            raise Unavailable(
                "a server process ended while it opened the model", remedy="its log says why"
            )
        self._identity = message["identity"]
        served: str = message["serving"]
        return served

    def _stop(self, number: int) -> None:
        """Starts the shutdown on a signal; a second signal kills all processes."""
        if not self._signals.begins(number):
            return
        self._stopping.set()
        self._listener.close()  # otherwise it would accept connections that no process serves
        self._send(FINISH)
        asyncio.get_running_loop().call_later(bound_s(self._settings) + SERVER_KILL_S, self._kill)

    async def _end(self) -> None:
        self._kill()
        for process in self._processes.values():
            await process.wait()

    def _kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for process in self._processes.values():
            process.signal(number)
