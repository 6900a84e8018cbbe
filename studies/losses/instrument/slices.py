"""A quick tier from the command line: due runs by one process for each core, then the table."""

import multiprocessing
import os
import shutil
import signal
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any, ClassVar, Protocol

import torch

from mlcd.cores import available_cores
from mlcd.errors import InvalidInput
from mlcd.training.preemption import Preempted, preemptible
from studies.losses.data import require
from studies.losses.hardware import origin
from studies.losses.instrument.rows import (
    Outcome,
    SlicedRun,
    gather,
    path_of,
    read_rows,
    table_of,
    write_row,
)


class SlicedTier(Protocol):
    """A tier of many runs that need nothing of each other. It is sent to other processes.

    name: of the tier and of its table. state: the directory of all that it makes. resumes: a run
    takes minutes and goes on where it was, so that it is stopped when the time is over. jobs: the
    runs at a time; 0 for one on each core.
    """

    name: ClassVar[str]
    resumes: ClassVar[bool]
    jobs: ClassVar[int]

    @property
    def data(self) -> Path: ...

    @property
    def state(self) -> Path: ...

    @property
    def required(self) -> Sequence[str]:
        """Returns the names of the data sets."""
        ...

    def all_runs(self) -> Iterable[SlicedRun]:
        """Returns every run of the tier, the most important first."""
        ...

    def prepare(self) -> None:
        """Makes what runs share, where that is not done."""
        ...

    def perform(self, run: Any) -> Outcome:
        """Performs one run; the same run gives the same numbers on one kind of CPU."""
        ...


def run_slices(tier: SlicedTier, options: Namespace) -> None:
    """Performs due runs until there are none, or the minutes are over, and gathers their rows.

    Runs that the table has are not due, but those of --only are.
    """
    require(tier.data, tier.required)
    runs = _due(tier, options.results, options.only)[: options.max_runs]
    if runs:
        tier.prepare()
        _perform_all(runs, tier, options)
    for line in gather(tier.name, tier.all_runs(), tier.state, options.results):
        print(line)


def _due(tier: SlicedTier, results: Path, only: Sequence[str] | None) -> list[SlicedRun]:
    known = {run.name: run for run in tier.all_runs()}
    if only is not None:
        if unknown := next((name for name in only if name not in known), None):
            raise InvalidInput(
                f"no run is called {unknown}", remedy="names stand in the column `run` of the table"
            )
        chosen = [known[name] for name in dict.fromkeys(only)]
        return [run for run in chosen if not path_of(run, tier.state).is_file()]
    done = {row["run"] for row in read_rows(table_of(tier.name, results))}
    return [
        run
        for name, run in known.items()
        if name not in done and not path_of(run, tier.state).is_file()
    ]


def _perform_all(runs: list[SlicedRun], tier: SlicedTier, options: Namespace) -> None:
    deadline = None if options.minutes is None else time.time() + 60 * options.minutes
    jobs = options.jobs or tier.jobs or available_cores()
    waiting = iter(runs)
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_one_thread
    ) as pool:
        running: set[Future[str]] = set()
        while True:
            while len(running) < jobs and (deadline is None or time.time() < deadline):
                if (run := next(waiting, None)) is None:
                    break
                stop = deadline if tier.resumes else None
                running.add(pool.submit(_perform_one, run, tier, stop))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                print(future.result(), flush=True)


def _one_thread() -> None:
    torch.set_num_threads(1)


def _perform_one(run: SlicedRun, tier: SlicedTier, deadline: float | None) -> str:
    try:
        with _stopped_at(deadline), preemptible():
            outcome = tier.perform(run)
    except Preempted:
        return f"interrupted {run.name}"
    write_row(tier.name, run, outcome, origin(), tier.state)
    if outcome.scratch is not None:
        shutil.rmtree(outcome.scratch)
    return f"finished {run.name}"


@contextmanager
def _stopped_at(deadline: float | None) -> Iterator[None]:
    """Sends this process SIGTERM at the deadline, which makes a training save and end."""
    if deadline is None:
        yield
        return
    timer = Timer(max(0.0, deadline - time.time()), os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
