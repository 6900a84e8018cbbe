"""The training loop: for each step load a batch, update, log, evaluate and save a checkpoint."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from mlcd.errors import Diverged, MlcdError, Unavailable
from mlcd.progress import Meter
from mlcd.training.bad_batch import bad_batch_path, bad_state_path, clear_bad_batch, keep_bad_batch
from mlcd.training.checkpoint.checkpoint_store import CheckpointStore
from mlcd.training.config import TrainingConfig
from mlcd.training.data.loader import StepBatches
from mlcd.training.preemption import Interrupted, Preempted, Signals, receive_signals
from mlcd.training.processes import Processes
from mlcd.training.telemetry.step_meters import NotFinite, StepMeters
from mlcd.training.telemetry.throughput import Throughput
from mlcd.world import ReportedElsewhere

_MAX_UNREADABLE: Final = 256  # images of consecutive steps of which no image could be read


class TrainingProgress(Protocol):
    """The counters of `mlcd.training.head.state.TrainState` that the loop advances."""

    step: int
    skipped_steps: int
    skipped_samples: int


class LoopWork(Protocol):
    """The work of one kind of training (labels or pairs) that the loop repeats."""

    @property
    def state(self) -> TrainingProgress: ...

    def load(self) -> AbstractContextManager[Iterable[StepBatches[Any]]]:
        """Opens the batches of all remaining steps, starting at `state.step`."""
        ...

    def step(
        self,
        batch: StepBatches[Any],
        shares: Sequence[float],
        row_counts: Sequence[Sequence[int]],
    ) -> StepMeters:
        """Updates the state once, without advancing `state.step`; for the arguments see
        `mlcd.training.step.train_step`.
        """
        ...

    def evaluate(self) -> dict[str, float] | None:
        """Returns the metrics at the current step; None if no evaluation is due."""
        ...


class StepLog(Protocol):
    """A log with one record per step."""

    def append(self, record: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Journal:
    """The logs of a run.

    records: logs of metrics (metrics.jsonl, TensorBoard), on process 0 only. keys: the log of
    sample keys; None without telemetry.keys.
    """

    records: tuple[StepLog, ...]
    keys: StepLog | None
    meter: Meter
    throughput: Throughput

    def record(self, facts: dict[str, Any]) -> None:
        for log in self.records:
            log.append(facts)


def train(
    work: LoopWork,
    config: TrainingConfig,
    *,
    run: Path,
    store: CheckpointStore,
    processes: Processes,
    journal: Journal,
) -> None:
    """Trains from `state.step` to the last step of the schedule.

    Raises Diverged, Interrupted and Preempted on all processes at the same step.
    """
    state = work.state
    current = [f"step {state.step}"]
    # Signals are outermost: when one process fails, torchrun sends SIGTERM to the others, which
    # must still report the failure.
    with (
        receive_signals() as signals,
        closing(store),
        processes.watch(current),
        work.load() as loader,
    ):
        num_unreadable = 0
        for batch, agreement in _agree(loader, processes, store, signals, config):
            current[0] = f"step {batch.step}"
            num_unreadable += config.schedule.batch_size
            if agreement.num_samples:
                num_unreadable = 0
            _check_readable(num_unreadable, batch.step, processes)
            meters = _step(
                work, batch, agreement, config, run=run, store=store, processes=processes
            )
            finished = state.step == config.schedule.steps
            _log_keys(journal, state, batch)
            num_images = sum(len(part.keys) for part in batch.parts)
            journal.throughput.add(num_images, batch.wait_s, batch.num_on_cpu)
            if meters is not None and (state.step % config.log_every == 0 or finished):
                _log(journal, state, meters, processes.world.size)
            if (evaluated := work.evaluate()) is not None:
                journal.record({"step": state.step, **evaluated})
            journal.meter.advance(1)
            if finished or store.is_due(state.step) or agreement.stop:
                store.save(state)
            if agreement.stop and not finished:
                store.join()
                raise Preempted(state.step) if agreement.preempted else Interrupted
        current[0] = "the last checkpoint"
        store.join()


@dataclass(frozen=True)
class _Agreement:
    """The facts about a step that all processes know.

    row_counts: number of samples by micro-batch and process.
    """

    row_counts: tuple[tuple[int, ...], ...]
    interrupted: bool
    preempted: bool

    @property
    def stop(self) -> bool:
        return self.interrupted or self.preempted

    @property
    def num_samples(self) -> int:
        return sum(map(sum, self.row_counts))

    @property
    def shares(self) -> list[float]:
        return [sum(counts) / max(1, self.num_samples) for counts in self.row_counts]


def _agree(
    loader: Iterable[StepBatches[Any]],
    processes: Processes,
    store: CheckpointStore,
    signals: Signals,
    config: TrainingConfig,
) -> Iterator[tuple[StepBatches[Any], _Agreement]]:
    """Yields each step's batch and the facts that all processes exchange in one sum.

    The sum runs on the host, so that no GPU waits. If loading fails on one process, all raise.
    """
    steps = iter(loader)
    while True:
        failure: MlcdError | None = None
        batch: StepBatches[Any] | None = None
        try:
            batch = next(steps, None)
        except MlcdError as error:
            failure = error
        if batch is None and failure is None:
            return
        parts = batch.parts if batch is not None else ()
        world, num_parts = processes.world, config.compute.accumulation
        counts = torch.zeros((num_parts, world.size), dtype=torch.int64)
        counts[:, world.rank] = torch.tensor([len(part.keys) for part in parts] or [0] * num_parts)
        flags = [signals.interrupted, signals.preempted, store.failed, failure is not None]
        own = torch.cat([counts.flatten(), torch.tensor(flags, dtype=torch.int64)])
        total = world.sum(own)
        interrupted, preempted, save_failed, load_failed = total[counts.numel() :].tolist()
        if load_failed:
            with processes.failing_together():
                if failure is not None:
                    raise failure
        if save_failed:
            store.join()
        assert batch is not None
        row_counts = total[: counts.numel()].view(num_parts, world.size).tolist()
        rows_of_parts = tuple(map(tuple, row_counts))
        yield batch, _Agreement(rows_of_parts, bool(interrupted), bool(preempted))


def _step(
    work: LoopWork,
    batch: StepBatches[Any],
    agreement: _Agreement,
    config: TrainingConfig,
    *,
    run: Path,
    store: CheckpointStore,
    processes: Processes,
) -> StepMeters | None:
    """Takes one step. Returns None if the step was skipped because it was not finite.

    Raises Diverged after too many skips.
    """
    state = work.state
    try:
        meters: StepMeters | None = work.step(batch, agreement.shares, agreement.row_counts)
    except NotFinite as error:
        meters = None
        _save_bad_batch(state, batch, error.meters, run=run, store=store, processes=processes)
        state.skipped_steps += 1
        if state.skipped_steps > config.optim.max_skips:
            # All processes raise; process 0 reports the error.
            raise (
                _describe_divergence(
                    run, batch.step, error.meters, supports_replay=config.supports_replay
                )
                if processes.world.rank == 0
                else ReportedElsewhere()
            ) from error
    state.step += 1
    state.skipped_samples += config.schedule.batch_size - agreement.num_samples
    return meters


def _check_readable(num_images: int, step: int, processes: Processes) -> None:
    """Raises Unavailable if too many images in a row, up to `step`, could not be read: the rest of
    the schedule would pass without training.
    """
    if num_images < _MAX_UNREADABLE:
        return
    if processes.world.rank:  # process 0 reports the error
        raise ReportedElsewhere
    raise Unavailable(
        f"the last {num_images} images, up to step {step}, cannot be read",
        remedy="make the images readable again, then run the same command to resume",
    )


def _save_bad_batch(
    state: TrainingProgress,
    batch: StepBatches[Any],
    meters: StepMeters,
    *,
    run: Path,
    store: CheckpointStore,
    processes: Processes,
) -> None:
    """Saves each process's part of the batch, and the state before the step, in bad_batches/."""
    with processes.failing_together():
        if processes.world.rank == 0:
            clear_bad_batch(run, batch.step)
    with processes.failing_together():
        keep_bad_batch(bad_batch_path(run, batch.step, processes.world.rank), batch, meters)
    store.save(state, bad_state_path(run, batch.step))
    store.join()


def _describe_divergence(
    run: Path, step: int, meters: StepMeters, *, supports_replay: bool
) -> Diverged:
    loss, *norms = (norm.item() for norm in meters.norms.values())
    return Diverged(
        f"step {step}: loss {loss}, gradient norms {' and '.join(map(str, norms))}; the batch is in"
        f" {bad_batch_path(run, step, 0)}",
        remedy=f"{'study it with --replay, ' if supports_replay else ''}lower optim.lr or "
        "loss.scale, or raise optim.max_skips",
    )


def _log(journal: Journal, state: TrainingProgress, meters: StepMeters, num_processes: int) -> None:
    numbers = meters.to_dict()
    rates = journal.throughput.read()
    rates["images_per_s"] *= num_processes
    counters = {"skipped_samples": state.skipped_samples, "skipped_steps": state.skipped_steps}
    record = {"step": state.step, **numbers, **rates, **counters}
    journal.record(record)
    shown = {
        "loss": numbers["loss"],
        "positive": numbers.get("positive_cosine"),
        "img_s": rates["images_per_s"],
    }
    journal.meter.advance(0, **shown)


def _log_keys(journal: Journal, state: TrainingProgress, batch: StepBatches[Any]) -> None:
    if journal.keys is not None:
        keys = [key for part in batch.parts for key in part.keys]
        journal.keys.append({"step": state.step, "keys": keys})
