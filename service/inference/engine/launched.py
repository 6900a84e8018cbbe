"""An engine's process before its first order; it imports its libraries meanwhile.

This module imports little: a process is launched before a server reads its settings.
"""

import os
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from mlcd.child import launch


@dataclass(frozen=True)
class LaunchedEngine:
    """A process that waits for the order to open an encoder.

    descriptor: the memory of its batches. began: by time.perf_counter.
    """

    process: "subprocess.Popen[bytes]"
    descriptor: int
    began: float

    def dismiss(self) -> None:
        """Ends the process, which gets no order."""
        os.close(self.descriptor)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        threading.Thread(target=self.process.wait, daemon=True).start()


def launch_engine() -> LaunchedEngine:
    """Starts a process. It needs no event loop, and ends when the calling thread does."""
    began, descriptor = time.perf_counter(), os.memfd_create("mlcd-batches")
    try:
        process = launch("mlcd.service.inference.engine.worker", descriptors=(descriptor,))
    except BaseException:
        os.close(descriptor)
        raise
    return LaunchedEngine(process, descriptor, began)
