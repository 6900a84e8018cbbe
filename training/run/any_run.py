"""Code that all runs share: the choice of algorithms, the draft, and the loop with its logs."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from mlcd.artifacts.disk import raise_if_disk_full
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.models.runs import checkpoint_steps
from mlcd.progress import Stages
from mlcd.training.checkpoint.checkpoint_store import CheckpointStore
from mlcd.training.config import TrainingConfig
from mlcd.training.loop import Journal, LoopWork, StepLog, train
from mlcd.training.processes import Processes
from mlcd.training.run.run_files import CHECKPOINTS
from mlcd.training.start import Start, open_start, read_sizes
from mlcd.training.telemetry.loss_picture import write_losses
from mlcd.training.telemetry.step_logs import KeysLog, MetricsLog, TensorBoardLog
from mlcd.training.telemetry.throughput import Throughput, measure_peak_tflops


def train_to_end(
    work: LoopWork,
    config: TrainingConfig,
    run: Path,
    store: CheckpointStore,
    processes: Processes,
    reporter: Stages,
    *,
    flops: float,
) -> None:
    """Trains from the last checkpoint to the last step; without a checkpoint, first saves step 0.

    flops: FLOPs of one sample in a step.
    """
    state = work.state
    with closing(store):
        if (step := _agree_on_latest(store, processes)) is None:
            store.save(state)
        else:
            store.load(state, step)
            store.tidy(step)
        with (
            reporter.stage("train", config.schedule.steps, done=state.step) as meter,
            _journal(run, config, flops, state.step, processes, meter) as journal,
        ):
            train(work, config, run=run, store=store, processes=processes, journal=journal)


def is_deterministic(config: TrainingConfig, device: torch.device) -> bool:
    """Returns True if only deterministic algorithms may be used (the same bits each time)."""
    if config.compute.deterministic is not None:
        return config.compute.deterministic
    return device.type == "cpu"


def choose_algorithms(config: TrainingConfig, device: torch.device) -> None:
    """Restricts PyTorch to deterministic algorithms, if the config says so.

    On a GPU other algorithms raise an error: with a mere warning, the backward pass of attention
    would keep summing in a random order.
    """
    torch.use_deterministic_algorithms(
        is_deterministic(config, device), warn_only=device.type != "cuda"
    )


def open_tower_start(config: TrainingConfig) -> Start | None:
    """Opens the tower that the run starts from; None for random weights."""
    tower = config.model
    if tower.start is None:
        return None
    start = open_start(tower.start, tower.like, Path(config.out))
    # If a recipe sets all sizes, they have not been compared with the weights yet.
    read_sizes(start.model, tower.start, tower.model_dump())
    return start


@contextmanager
def open_draft(out: Path, request: Request, processes: Processes) -> Iterator[Draft]:
    """Opens the draft of the run for every process.

    Only process 0 holds the lock and publishes; the others write into the same directory. Once a
    step is saved, the draft is kept even after an input error, which may be temporary: for example,
    the images of an evaluation may be unreachable.
    """
    draft = Draft(out, request)
    with ExitStack() as stack:
        with processes.failing_together():
            if processes.world.rank == 0:
                stack.enter_context(draft)
        try:
            yield draft
        except OSError as error:
            raise_if_disk_full(error, out)
            raise
        except (InvalidInput, ConfigInvalid):
            if any(checkpoint_steps(draft.path / CHECKPOINTS)):
                draft.keep()
            raise


def _agree_on_latest(store: CheckpointStore, processes: Processes) -> int | None:
    """Returns the step of process 0's latest checkpoint; None if there is none.

    Other processes may see an outdated listing of a shared disk.
    """
    own_latest = store.latest() if processes.world.rank == 0 else None
    latest = int(processes.world.max(torch.tensor(-1 if own_latest is None else own_latest)))
    return None if latest < 0 else latest


@contextmanager
def _journal(
    run: Path,
    config: TrainingConfig,
    flops: float,
    step: int,
    processes: Processes,
    meter: Any,
) -> Iterator[Journal]:
    """Opens the logs: process 0 writes the metrics, each process the keys of its samples."""
    device, rank = processes.device, processes.world.rank
    with ExitStack() as stack:
        records: list[StepLog] = []
        with processes.failing_together():
            if rank == 0:
                records.append(MetricsLog(run, step))
                stack.callback(write_losses, run)
                KeysLog.truncate_all(run, step)
            if rank == 0 and config.telemetry.tensorboard:
                tensorboard = TensorBoardLog(run, step)
                stack.callback(tensorboard.close)
                records.append(tensorboard)
        peak = config.telemetry.peak_tflops or measure_peak_tflops(device, config.compute.precision)
        yield Journal(
            records=tuple(records),
            keys=KeysLog(run, rank) if config.telemetry.keys else None,
            meter=meter,
            throughput=Throughput(flops, peak, device),
        )
