"""The worker processes of one machine: each gets its task, reports its progress, and ends with the
parent.

A worker reads its task as one line of JSON from standard input, which then stays open: its end
means that the parent is gone. It writes lines of JSON to standard output: {"part", "done"}, or
{"error", "message", "remedy"}.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

from mlcd import errors
from mlcd.errors import MlcdError, Unavailable

_PATIENCE: Final = 3  # deaths for each worker, without any progress in between, before we give up

_Process: TypeAlias = "subprocess.Popen[str]"
_Message: TypeAlias = dict[str, Any]
_Event: TypeAlias = tuple[_Process, _Message | None]


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
            process, message = crew.events.get()
            if message is not None:
                _raise_if_error(message)
                deaths = 0
                on_progress(message["part"], message["done"])
                continue
            crew.bury(process)
            if not finished() and (process.returncode < 0 or not crew.alive):
                deaths += 1
                if deaths > _PATIENCE * num_workers:
                    raise Unavailable(
                        "the workers are killed", remedy="run again with fewer: memory may be short"
                    )
                crew.start()
    finally:
        crew.dismiss()


class _Crew:
    def __init__(self, module: str, task: Mapping[str, Any], num_threads: int) -> None:
        self._command = [sys.executable, "-m", module]
        self._task = json.dumps(task) + "\n"
        # The BLAS of numpy and torch reads it only when it is loaded.
        # the child's environment, as in demo
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}  # noqa: TID251
        self.alive: set[_Process] = set()
        self.events: SimpleQueue[_Event] = SimpleQueue()

    def start(self) -> None:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        self.alive.add(process)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        assert process.stdin is not None
        # the worker is dead already, which `_listen` notices
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._task)
            process.stdin.flush()

    def _listen(self, process: _Process) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.endswith("\n"):  # otherwise it was killed while it wrote
                    self.events.put((process, json.loads(line)))
        process.wait()
        self.events.put((process, None))

    def bury(self, process: _Process) -> None:
        """Raises where the worker ended by itself with a failure that it could not report."""
        self.alive.discard(process)
        _close(process)
        if process.returncode > 0:
            raise RuntimeError(f"a worker ended with status {process.returncode}")

    def dismiss(self) -> None:
        for process in self.alive:
            process.kill()
        for process in self.alive:
            process.wait()
            _close(process)


def _close(process: _Process) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # a part of the task was still to be written
        process.stdin.close()


def _raise_if_error(message: _Message) -> None:
    if "error" not in message:
        return
    kind = getattr(errors, message["error"], None)
    if kind is None:
        raise RuntimeError(f"a worker failed\n{message['message']}")
    raise kind(message["message"], remedy=message["remedy"])


def serve_as_worker(work: Callable[[dict[str, Any], Callable[[int, int], None]], None]) -> None:
    """Serves as the worker: reads the task, does the work, reports progress (part, done) and
    errors, and ends with the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a library is no message
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def send(message: _Message) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    try:
        work(task, lambda part, done: send({"part": part, "done": done}))
    except MlcdError as error:
        send({"error": type(error).__name__, "message": error.message, "remedy": error.remedy})
    except Exception:  # noqa: BLE001 - the parent shows it as its own
        send({"error": "", "message": traceback.format_exc(), "remedy": None})


def _end_with_parent() -> None:
    # Not sys.stdin: its lock, held by a daemon thread, would crash the interpreter's exit.
    while os.read(0, 1):
        pass
    os._exit(1)
