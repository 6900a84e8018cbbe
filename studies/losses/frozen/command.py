"""The frozen tier from the command line: due runs by one process for each core, then the table."""

import multiprocessing
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import torch

from mlcd.cores import available_cores
from mlcd.errors import InvalidInput
from studies.losses.data import require
from studies.losses.frozen.arms import FrozenRun, all_runs
from studies.losses.frozen.features import ASKED, PRETRAINING, Features, Teacher
from studies.losses.frozen.rows import TABLE, gather, path_of, read_rows, write_row
from studies.losses.frozen.run import perform
from studies.losses.hardware import origin

_opened: dict[str, Teacher] = {}


def run_frozen(options: Namespace) -> None:
    """Performs due runs until there are none, or the minutes are over, and gathers their rows.

    Runs that the table has are not due, but those of --only are.
    """
    features = Features(options.data, options.out / "frozen")
    require(features.data, [PRETRAINING, *ASKED, "encoders"])
    runs = _due(features, options.results, options.only)[: options.max_runs]
    if runs:
        features.prepare()
        _perform_all(runs, features, options)
    for line in gather(features.state, options.results):
        print(line)


def _due(features: Features, results: Path, only: Sequence[str] | None) -> list[FrozenRun]:
    known = {run.name: run for run in all_runs()}
    if only is not None:
        if unknown := next((name for name in only if name not in known), None):
            raise InvalidInput(
                f"no run is called {unknown}", remedy="names stand in the column `run` of the table"
            )
        chosen = [known[name] for name in dict.fromkeys(only)]
        return [run for run in chosen if not path_of(run, features.state).is_file()]
    done = {row["run"] for row in read_rows(results / TABLE)}
    return [
        run
        for name, run in known.items()
        if name not in done and not path_of(run, features.state).is_file()
    ]


def _perform_all(runs: list[FrozenRun], features: Features, options: Namespace) -> None:
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    jobs = options.jobs or available_cores()
    waiting = iter(runs)
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_one_thread
    ) as pool:
        running: set[Future[str]] = set()
        while True:
            while len(running) < jobs and (deadline is None or time.monotonic() < deadline):
                if (run := next(waiting, None)) is None:
                    break
                running.add(pool.submit(_perform_one, run, features))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                print(f"finished {future.result()}", flush=True)


def _one_thread() -> None:
    torch.set_num_threads(1)


def _perform_one(run: FrozenRun, features: Features) -> str:
    if run.teacher not in _opened:
        _opened.clear()  # one teacher is in memory at a time
        _opened[run.teacher] = features.open(run.teacher)
    write_row(run, perform(run, _opened[run.teacher], features.state), origin(), features.state)
    return run.name
