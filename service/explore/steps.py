"""Runs the public commands of an exploration, each in a process that ends with this one:
`python -m mlcd.service.explore.steps PARENT ARGUMENTS…`.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from mlcd.errors import MlcdError
from mlcd.service.timings import STEP_ERROR_S

_PR_SET_PDEATHSIG: Final = 1  # <sys/prctl.h>


class StepFailed(MlcdError):
    """A command ended with an error, which it printed in one line."""


class ExplorationStopped(Exception):
    """The exploration was told to stop."""


class ExplorationSteps:
    """Runs commands one after the other until `stop`."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def check(self) -> None:
        """Raises ExplorationStopped once `stop` was called."""
        if self._stopping.is_set():
            raise ExplorationStopped

    def stop(self) -> None:
        """Ends the running command as Ctrl-C does, and prevents further commands."""
        self._stopping.set()
        with self._lock:
            if self._process is not None:
                self._process.send_signal(signal.SIGINT)

    def run(
        self, arguments: Sequence[str], on_event: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> dict[str, Any]:
        """Runs `mlcd ARGUMENTS --json` and returns its last line of output.

        on_event: called with each line of output. Raises StepFailed with the command's error.
        """
        command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), *arguments, "--json"]
        with self._lock:
            self.check()
            self._process = process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,
            )
        result: dict[str, Any] = {}
        assert process.stdout is not None
        assert process.stderr is not None
        with process:
            error_lines: list[str] = []
            # on a thread, because both pipes must be read: the command blocks when one is full
            error_reader = threading.Thread(target=lambda: error_lines.extend(process.stderr or ()))
            error_reader.start()
            for line in process.stdout:
                result = json.loads(line)
                on_event(result)
            status = process.wait()
            error_reader.join(STEP_ERROR_S)
        with self._lock:
            self._process = None
        self.check()
        if status != 0:
            reason = (
                error_lines[-1].strip().removeprefix("mlcd: ")
                if error_lines
                else f"exit status {status}"
            )
            raise StepFailed(f"`mlcd {arguments[0]}`: {reason}")
        return result


def _run_as_child() -> None:
    """Runs the command whose arguments follow the parent's process id."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # the parent died before prctl
        sys.exit(1)
    del sys.argv[1]
    from mlcd.__main__ import main

    main()


if __name__ == "__main__":
    _run_as_child()
