"""The worker processes of one machine: each gets its task, reports its progress, and ends with the
parent.

The parent's message is the task. A worker's messages are {"part", "done"}, or {"bug"} with the
traceback of an unexpected error.
"""

import os
import subprocess
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

from mlcd.child import (
    Message,
    Parent,
    block_stops,
    child_command,
    from_line,
    serve_parent,
    to_line,
)
from mlcd.errors import MlcdError, Unavailable

_PATIENCE: Final = 3  # deaths for each worker, without any progress in between, before we give up

_Process: TypeAlias = "subprocess.Popen[bytes]"


def run_workers(
    module: str,
    task: Mapping[str, Any],
    *,
    num_workers: int,
    num_threads: int,
    finished: Callable[[], bool],
    on_progress: Callable[[int, int], None],
) -> None:
    """Runs `python -m module` that many times until `finished`; a killed process is replaced.

    num_threads: those of each worker. on_progress: is called with (part, done in it). Raises what a
    worker raised, and Unavailable where workers are killed over and over.
    """
    crew = _Crew(module, task, num_threads)
    deaths = 0
    try:
        for _ in range(num_workers):
            crew.start()
        while crew.alive:
            process, line = crew.lines.get()
            if (message := from_line(line)) is not None:
                _raise_if_bug(message)
                deaths = 0
                on_progress(message["part"], message["done"])
                continue
            crew.bury(process)
            if not finished() and (process.returncode < 0 or not crew.alive):
                deaths += 1
                if deaths > _PATIENCE * num_workers:
                    raise Unavailable(
                        "the workers were killed over and over",
                        remedy="run again with fewer: memory may be short",
                    )
                crew.start()
    finally:
        crew.dismiss()


class _Crew:
    """The living workers, and the lines that they write; no line is the last of one that ended."""

    def __init__(self, module: str, task: Mapping[str, Any], num_threads: int) -> None:
        self._command = child_command(module)
        self._task = to_line(dict(task))
        # The BLAS of numpy and torch reads it only when it is loaded.
        # the child's environment, as in demo
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}  # noqa: TID251
        self.alive: set[_Process] = set()
        self.lines: SimpleQueue[tuple[_Process, bytes]] = SimpleQueue()

    def start(self) -> None:
        with block_stops():
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
            )
            self.alive.add(process)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        assert process.stdin is not None
        # the worker is dead already, which `_listen` notices
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(self._task)

    def _listen(self, process: _Process) -> None:
        assert process.stdout is not None
        with process.stdout:
            # otherwise it was killed while it wrote
            while (line := process.stdout.readline()).endswith(b"\n"):
                self.lines.put((process, line))
        process.wait()
        self.lines.put((process, b""))

    def bury(self, process: _Process) -> None:
        """Raises where the worker ended by itself with a failure that it could not report."""
        self.alive.discard(process)
        if process.returncode > 0:
            raise RuntimeError(f"a worker ended with status {process.returncode}")

    def dismiss(self) -> None:
        for process in self.alive:
            process.kill()
        for process in self.alive:
            process.wait()


def _raise_if_bug(message: Message) -> None:
    if "bug" in message:
        raise RuntimeError(f"a worker failed\n{message['bug']}")


def serve_as_worker(work: Callable[[dict[str, Any], Callable[[int, int], None]], None]) -> None:
    """Serves as the worker: does the task, and reports progress (part, done) and errors."""

    def perform(task: Message, parent: Parent) -> None:
        try:
            work(task, lambda part, done: parent.send({"part": part, "done": done}))
        except MlcdError:
            raise
        except Exception:  # noqa: BLE001 - the parent shows it as its own
            parent.send({"bug": traceback.format_exc()})

    serve_parent(perform)
