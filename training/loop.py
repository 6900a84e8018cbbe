"""The training loop, in order of time: batch, step, log, evaluate, checkpoint."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from mlcd.errors import Diverged, MlcdError
from mlcd.progress import Meter
from mlcd.world import Elsewhere
from training.bad_batch import bad_batch_path, bad_state_path, clear_bad_batch, keep_bad_batch
from training.checkpoint.checkpoint_store import CheckpointStore
from training.config import RunConfig
from training.data.dataset import Dataset
from training.data.loader import Loader, StepBatches
from training.evaluation.image_features import PreparedImages
from training.evaluation.while_training import evaluate_model
from training.parallel.processes import Processes
from training.preemption import Interrupted, Preempted, Signals, received_signals
from training.state import TrainState
from training.step import Meters, NotFinite, train_step
from training.telemetry.throughput import Throughput


class StepLog(Protocol):
    """A log that takes the numbers of a step."""

    def append(self, record: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Journal:
    """The logs of a run.

    records: metrics.jsonl and the like, on process 0 only. keys: the log of keys, if it was asked
    for.
    """

    records: tuple[StepLog, ...]
    keys: StepLog | None
    meter: Meter
    throughput: Throughput

    def record(self, facts: dict[str, Any]) -> None:
        for log in self.records:
            log.append(facts)


def train(
    state: TrainState,
    dataset: Dataset,
    config: RunConfig,
    *,
    run: Path,
    store: CheckpointStore,
    processes: Processes,
    journal: Journal,
    evaluation: PreparedImages | None,
) -> None:
    """Trains `state` from its step to the last one of the schedule.

    evaluation: the result of `check_evaluation`. Raises Diverged, Interrupted and Preempted on all
    processes at the same step.
    """
    work = [f"step {state.step}"]
    world = processes.world
    # Signals are outermost: torchrun stops the others when one fails, and they have to report it.
    with (
        received_signals() as signals,
        closing(store),
        processes.watched(work),
        Loader(
            dataset,
            config,
            rank=world.rank,
            size=world.size,
            start_step=state.step,
            local_size=processes.local_size,
            device=processes.device,
        ) as loader,
    ):
        for batch, agreement in _agreed(loader, processes, store, signals, config):
            work[0] = f"step {batch.step}"
            meters = _step(
                state, batch, agreement, config, run=run, store=store, processes=processes
            )
            finished = state.step == config.schedule.steps
            _log_keys(journal, state, batch)
            journal.throughput.add(sum(len(part.keys) for part in batch.parts), batch.wait_s)
            if meters is not None and (state.step % config.log_every == 0 or finished):
                _log(journal, state, meters, world.size)
            if config.evaluation.every_steps and state.step % config.evaluation.every_steps == 0:
                measured = evaluate_model(state.servable(), config, world=world, images=evaluation)
                journal.record({"step": state.step, **measured})
            journal.meter.advance(1)
            if finished or store.is_due(state.step) or agreement.stop:
                store.save(state)
            if agreement.stop and not finished:
                store.join()
                raise Preempted(state.step) if agreement.preempted else Interrupted
        work[0] = "the last checkpoint"
        store.join()


@dataclass(frozen=True)
class _Agreement:
    """The facts about a step that all processes agree on.

    row_counts: for each micro-batch the samples of each process.
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


def _agreed(
    loader: Loader,
    processes: Processes,
    store: CheckpointStore,
    signals: Signals,
    config: RunConfig,
) -> Iterator[tuple[StepBatches, _Agreement]]:
    """Yields each step's batch with what one sum over all processes says about it.

    The sum is on the host, so that no GPU waits.
    """
    steps = iter(loader)
    while True:
        failure: MlcdError | None = None
        batch: StepBatches | None = None
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
        facts = [signals.interrupted, signals.preempted, store.failed, failure is not None]
        own = torch.cat([counts.flatten(), torch.tensor(facts, dtype=torch.int64)])
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
        agreed = tuple(map(tuple, row_counts))
        yield batch, _Agreement(agreed, bool(interrupted), bool(preempted))


def _step(
    state: TrainState,
    batch: StepBatches,
    agreement: _Agreement,
    config: RunConfig,
    *,
    run: Path,
    store: CheckpointStore,
    processes: Processes,
) -> Meters | None:
    """Takes one step of `state`. Returns None if it was skipped because it was not finite.

    Raises Diverged after too many skips.
    """
    try:
        meters = train_step(state, batch.parts, agreement.shares, config, agreement.row_counts)
    except NotFinite as error:
        meters = None
        _keep(state, batch, error.meters, run=run, store=store, processes=processes)
        state.skipped_steps += 1
        if state.skipped_steps > config.optim.max_skips:
            # All processes know it, and one reports it.
            raise (
                _diverged(run, batch.step, error.meters)
                if processes.world.rank == 0
                else Elsewhere()
            ) from error
    state.step += 1
    state.skipped_samples += config.schedule.batch_size - agreement.num_samples
    return meters


def _keep(
    state: TrainState,
    batch: StepBatches,
    meters: Meters,
    *,
    run: Path,
    store: CheckpointStore,
    processes: Processes,
) -> None:
    """Saves the batch, each process its part, and the state before it, beside the run's
    checkpoints.
    """
    with processes.failing_together():
        if processes.world.rank == 0:
            clear_bad_batch(run, batch.step)
    with processes.failing_together():
        keep_bad_batch(bad_batch_path(run, batch.step, processes.world.rank), batch, meters)
    store.save(state, bad_state_path(run, batch.step))
    store.join()


def _diverged(run: Path, step: int, meters: Meters) -> Diverged:
    return Diverged(
        f"step {step}: loss {meters.loss.item()}, gradient norms {meters.grad_norm.item()} and"
        f" {meters.center_grad_norm.item()}; the batch is in {bad_batch_path(run, step, 0)}",
        remedy="study it with --replay, lower optim.lr or loss.scale, or allow optim.max_skips",
    )


def _log(journal: Journal, state: TrainState, meters: Meters, num_processes: int) -> None:
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


def _log_keys(journal: Journal, state: TrainState, batch: StepBatches) -> None:
    if journal.keys is not None:
        keys = [key for part in batch.parts for key in part.keys]
        journal.keys.append({"step": state.step, "keys": keys})
