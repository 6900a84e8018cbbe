"""One training step, from micro-batches to loss, gradients, update and meters."""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.losses.positives import check_labels
from training.config import RunConfig
from training.drop_path import branch_scales
from training.optim.clip import clip_global_norm
from training.optim.schedule import learning_rate
from training.state import TrainState


class MicroBatch(Protocol):
    """A micro-batch; see `training.data.loader.Batch`."""

    @property
    def images(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def positions(self) -> NDArray[np.int64]: ...
    @property
    def weights(self) -> Tensor | None: ...


@dataclass(frozen=True)
class Meters:
    """The scalar tensors of one step, over all processes; read them only when they are logged."""

    loss: Tensor
    head: dict[str, Tensor]
    grad_norm: Tensor
    center_grad_norm: Tensor
    lr: float

    def to_dict(self) -> dict[str, float | None]:
        tensors = {
            "loss": self.loss,
            **self.head,
            "grad_norm": self.grad_norm,
            "center_grad_norm": self.center_grad_norm,
        }
        # JSON has no NaN, so a mean over nothing (no positive, no negative) is null.
        values = {name: tensor.item() for name, tensor in tensors.items()}
        return {
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
            "lr": self.lr,
        }


class NotFinite(Exception):
    """Loss or gradient is not finite, on all processes alike.

    Nothing was updated, and the gradients are dropped.
    """

    def __init__(self, meters: Meters) -> None:
        super().__init__("not finite")
        self.meters = meters


def on_device(parts: Sequence[MicroBatch], device: torch.device) -> Iterator[Tensor]:
    """Yields the images of one micro-batch at a time, as floating-point numbers on the device.

    So only one micro-batch takes memory there in that form.
    """
    for part in parts:
        yield part.images.to(device, non_blocking=True).float()


def train_step(
    state: TrainState,
    batches: Sequence[MicroBatch],
    shares: Sequence[float],
    config: RunConfig,
    row_counts: Sequence[Sequence[int]] | None = None,
) -> Meters:
    """Updates `state` once, by micro-batches, without advancing `state.step`.

    batches: in the host's memory. shares: each micro-batch's share of the global step, the same on
    all processes; a micro-batch without a share is left out. row_counts: for each micro-batch the
    samples of each process; None asks the processes. Raises NotFinite before the update.
    """
    lr = _set_learning_rate(state, config)
    # No sample of the step could be used.
    if not any(shares):
        nothing = torch.tensor(math.nan)
        return Meters(nothing, {}, nothing, nothing, lr)
    loss, head = backward(state, batches, shares, config, row_counts)
    max_norm = config.optim.clip_norm or float("inf")
    centers = [state.centers.weight]
    norms = clip_global_norm(state.replicated(), centers, max_norm, state.centers.world)
    meters = Meters(loss, head, *norms, lr)
    finite = torch.isfinite(loss) & torch.isfinite(norms[0]) & torch.isfinite(norms[1])
    # This is the only value that the host reads. It is a maximum, so that all processes decide
    # alike.
    if bool(state.centers.world.max(torch.where(finite, 0.0, 1.0))):
        _drop_gradients(state)
        raise NotFinite(meters)
    for optimizer in state.optimizers:
        optimizer.step()
    _drop_gradients(state)
    if state.average is not None:
        state.average.update(state.model.trunk, state.step)
    return meters


def backward(
    state: TrainState,
    batches: Sequence[MicroBatch],
    shares: Sequence[float],
    config: RunConfig,
    row_counts: Sequence[Sequence[int]] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes gradients of the global mean loss in `state`'s parameters; returns loss and meters.

    The gradients are averaged over processes.
    """
    world, device = state.centers.world, state.centers.weight.device
    for batch in batches:
        check_labels(batch.labels, state.centers.shard.num_classes)
    labels = [batch.labels.to(device, non_blocking=True) for batch in batches]
    step_labels = None
    # With one micro-batch the head gathers the step's labels itself.
    if len(labels) > 1:
        of_step = (
            None if row_counts is None else [sum(each) for each in zip(*row_counts, strict=True)]
        )
        step_labels = world.gather_rows(torch.cat(labels), of_step)
    state.model.train()
    _drop_gradients(state)
    loss = torch.zeros((), dtype=state.centers.weight.dtype, device=device)
    parts: list[tuple[float, dict[str, Tensor]]] = []
    last = max((index for index, share in enumerate(shares) if share), default=-1)
    images = on_device(batches, device)
    for index, (pixels, share) in enumerate(zip(images, shares, strict=True)):
        if share == 0.0:
            continue
        scales = branch_scales(config.model, batches[index].positions, config.seed)
        with nullcontext() if index == last else state.backbone.accumulating():
            embeddings = state.backbone.embed(pixels, None if scales is None else scales.to(pixels))
            weights = batches[index].weights
            output = state.centers(
                embeddings,
                labels[index],
                state.step,
                weights=None if weights is None else weights.to(device, non_blocking=True),
                step_labels=step_labels,
                row_counts=None if row_counts is None else row_counts[index],
            )
            (share * output.loss).backward()
        loss += share * output.loss.detach()
        parts.append((share, output.meters))
    return loss, _averaged(parts)


def _set_learning_rate(state: TrainState, config: RunConfig) -> float:
    factor = learning_rate(
        state.step,
        peak=1.0,
        warmup_steps=config.optim.warmup_steps,
        num_steps=config.schedule.steps,
    )
    for group in (*state.optimizer.param_groups, *state.center_optimizer.param_groups):
        group["lr"] = factor * group["peak_lr"]
    return factor * config.optim.lr


def _drop_gradients(state: TrainState) -> None:
    for optimizer in state.optimizers:
        optimizer.zero_grad(set_to_none=True)


def _averaged(parts: Sequence[tuple[float, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Averages meters by share; a meter that is NaN (a mean over nothing) does not count."""
    if len(parts) == 1:
        return dict(parts[0][1])
    averages = {}
    for name in parts[0][1] if parts else ():
        values = torch.stack([meters[name] for _, meters in parts]).double()
        shares = torch.tensor(
            [share for share, _ in parts], dtype=values.dtype, device=values.device
        )
        shares = torch.where(values.isnan(), 0.0, shares)
        averages[name] = (values.nan_to_num() * shares).sum() / shares.sum()
    return averages
