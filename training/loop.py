"""The loop, in the order time flows: batch, augment, step, log, checkpoint."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mlcd.artifact import Parent
from mlcd.progress import Meter
from training.checkpoint.store import CheckpointStore
from training.config import RunConfig
from training.data.augment import augment
from training.data.order import batch_positions, sample_rows
from training.data.samples import Samples
from training.state import TrainState
from training.step import Meters, train_step
from training.telemetry.metrics import MetricsLog


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came; a checkpoint of the reached step is on disk."""


def train(
    state: TrainState,
    samples: Samples,
    config: RunConfig,
    *,
    store: CheckpointStore,
    parents: tuple[Parent, ...],
    log: MetricsLog,
    meter: Meter,
) -> None:
    """Bring `state` from its step to the last one of the schedule."""
    device = state.centers.weight.device
    window_start, window_images = time.perf_counter(), 0
    with _stop_requested() as stop_requested:
        while state.step < config.schedule.steps:
            positions = batch_positions(state.step, config.schedule.batch_size)
            rows = torch.from_numpy(sample_rows(positions, len(samples), config.seed))
            images = augment(
                samples.pixels[rows].to(device),
                positions,
                image_size=config.model.image_size,
                config=config.augment,
                seed=config.seed,
            )
            meters = train_step(state, images, samples.labels[rows].to(device), config)
            window_images += len(rows)
            finished = state.step == config.schedule.steps
            if state.step % config.log_every == 0 or finished:
                record = _record(state, meters, window_images / (time.perf_counter() - window_start))
                log.append(record)
                meter.advance(0, loss=record["loss"], positive=record["positive_cosine"], img_s=record["images_per_s"])
                window_start, window_images = time.perf_counter(), 0
            meter.advance(1)
            if finished or store.is_due(state.step) or stop_requested():
                store.save(state, parents)
            if stop_requested() and not finished:
                raise Interrupted


def _record(state: TrainState, meters: Meters, images_per_s: float) -> dict[str, object]:
    return {"step": state.step, **meters.to_dict(), "images_per_s": round(images_per_s, 1)}


@contextmanager
def _stop_requested() -> Iterator[Callable[[], bool]]:
    """Turn SIGINT and SIGTERM into a question that the loop asks between steps."""
    received: list[int] = []

    def remember(number: int, _: object) -> None:
        received.append(number)

    previous = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
