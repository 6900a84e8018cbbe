"""Launches an engine's process, which imports its libraries until it gets its order.

This module imports little, because a server launches a process before it reads its settings.
"""

import os
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec

from mlcd.child import launch


@dataclass(frozen=True)
class LaunchedEngine:
    """A process that waits for the order to open an encoder.

    descriptor: file descriptor of the shared memory for its batches. launched_at: time of the
    launch, by time.perf_counter.
    """

    process: "subprocess.Popen[bytes]"
    descriptor: int
    launched_at: float

    def dismiss(self) -> None:
        """Ends the process without an order."""
        os.close(self.descriptor)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        threading.Thread(target=self.process.wait, daemon=True).start()


def launch_engine() -> LaunchedEngine:
    """Starts a process, which ends with the calling thread. Needs no event loop."""
    if find_spec("pydantic_settings") is None:  # of the packages of a server, which it would miss
        raise ModuleNotFoundError(name="pydantic_settings")
    launched_at, descriptor = time.perf_counter(), os.memfd_create("mlcd-batches")
    try:
        process = launch("mlcd.service.inference.engine.worker", descriptors=(descriptor,))
    except BaseException:
        os.close(descriptor)
        raise
    return LaunchedEngine(process, descriptor, launched_at)
