"""Worker processes on one machine. Each receives its task, reports progress, and ends with its
parent process.

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

_MAX_DEATHS_PER_WORKER: Final = 3  # without any progress in between

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
    """Runs `num_workers` times `python -m module` until `finished`; replaces a killed process.

    num_threads: number of threads per worker. on_progress: called with (part, number done in it).
    Raises a worker's error, and Unavailable if workers are killed repeatedly.
    """
    pool = _WorkerPool(module, task, num_threads)
    deaths = 0
    try:
        for _ in range(num_workers):
            pool.start()
        while pool.alive:
            process, line = pool.lines.get()
            if (message := from_line(line)) is not None:
                _raise_if_bug(message)
                deaths = 0
                on_progress(message["part"], message["done"])
                continue
            pool.remove(process)
            if not finished() and (process.returncode < 0 or not pool.alive):
                deaths += 1
                if deaths > _MAX_DEATHS_PER_WORKER * num_workers:
                    raise Unavailable(
                        "the workers were killed repeatedly",
                        remedy="memory may have run out: run again with fewer workers",
                    )
                pool.start()
    finally:
        pool.kill_all()


class _WorkerPool:
    """The running workers, and the lines they write; an empty line means that a worker ended."""

    def __init__(self, module: str, task: Mapping[str, Any], num_threads: int) -> None:
        self._command = child_command(module)
        self._task = to_line(dict(task))
        # The BLAS of numpy and torch reads OMP_NUM_THREADS only when the library is loaded.
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
            # a line without its end: the worker was killed while it wrote
            while (line := process.stdout.readline()).endswith(b"\n"):
                self.lines.put((process, line))
        process.wait()
        self.lines.put((process, b""))

    def remove(self, process: _Process) -> None:
        """Removes an ended worker. Raises RuntimeError if it failed without reporting the error."""
        self.alive.discard(process)
        if process.returncode > 0:
            raise RuntimeError(f"a worker ended with status {process.returncode}")

    def kill_all(self) -> None:
        for process in self.alive:
            process.kill()
        for process in self.alive:
            process.wait()


def _raise_if_bug(message: Message) -> None:
    if "bug" in message:
        raise RuntimeError(f"a worker failed\n{message['bug']}")


def serve_as_worker(work: Callable[[dict[str, Any], Callable[[int, int], None]], None]) -> None:
    """Runs the worker: performs the task, and reports progress (part, done) and errors."""

    def perform(task: Message, parent: Parent) -> None:
        try:
            work(task, lambda part, done: parent.send({"part": part, "done": done}))
        except MlcdError:
            raise
        except Exception:  # noqa: BLE001 - the parent shows it as its own
            parent.send({"bug": traceback.format_exc()})

    serve_parent(perform)
