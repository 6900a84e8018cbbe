"""One training step: loss and gradients of the micro-batches, update and meters."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.losses.positives import check_labels
from mlcd.training.config import RunConfig
from mlcd.training.data.colors import draw_colors
from mlcd.training.data.drop_path import branch_scales
from mlcd.training.data.recoloring import recolor
from mlcd.training.head.row_gradients import sum_duplicate_rows
from mlcd.training.head.state import TrainState
from mlcd.training.optim.clip import clip_global_norm
from mlcd.training.optim.schedule import set_learning_rate
from mlcd.training.telemetry.step_meters import NotFinite, read_scalars


class MicroBatch(Protocol):
    """A micro-batch; see `mlcd.training.data.loader.Batch`."""

    @property
    def images(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def positions(self) -> NDArray[np.int64]: ...
    @property
    def weights(self) -> Tensor | None: ...
    @property
    def more_views(self) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Meters:
    """The scalar tensors of one step, over all processes.

    Reading one waits for the device, so read them only to log them.
    """

    loss: Tensor
    head: dict[str, Tensor]
    grad_norm: Tensor
    center_grad_norm: Tensor
    lr: float

    @property
    def norms(self) -> dict[str, Tensor]:
        """Returns the loss and the gradient norms."""
        return {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "center_grad_norm": self.center_grad_norm,
        }

    def to_dict(self) -> dict[str, float | None]:
        return {**read_scalars({"loss": self.loss, **self.head, **self.norms}), "lr": self.lr}


def train_step(
    state: TrainState,
    batches: Sequence[MicroBatch],
    shares: Sequence[float],
    config: RunConfig,
    row_counts: Sequence[Sequence[int]] | None = None,
) -> Meters:
    """Updates `state` once from several micro-batches, without advancing `state.step`.

    batches: micro-batches in the host's memory. shares: each micro-batch's share of the step's
    samples, the same on all processes; a micro-batch with share 0 is skipped. row_counts: number of
    samples by micro-batch and process; None exchanges them. Raises NotFinite, without updating.
    """
    lr = set_learning_rate(
        state.optimizers, config.optim, step=state.step, num_steps=config.schedule.steps
    )
    # No sample of the step could be decoded.
    if not any(shares):
        nan = torch.tensor(math.nan)
        return Meters(nan, {}, nan, nan, lr)
    loss, head = backward(state, batches, shares, config, row_counts)
    max_norm = config.optim.clip_norm or float("inf")
    world = state.head.world
    norms = clip_global_norm(state.replicated, state.sharded, max_norm, world)
    meters = Meters(loss, head, *norms, lr)
    finite = torch.isfinite(loss) & torch.isfinite(norms[0]) & torch.isfinite(norms[1])
    # The only value that the host reads. The maximum makes all processes decide alike.
    if bool(world.max(torch.where(finite, 0.0, 1.0))):
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
    """Sets the parameters' gradients of the global mean loss; returns loss and meters.

    The gradients are averaged over processes. The views of a micro-batch run one after another, so
    only one view's activations are in memory.
    """
    state.model.train()
    _drop_gradients(state)
    head, device = state.head, state.device
    for batch in batches:
        check_labels(batch.labels, head.shard.num_classes)
    labels = [batch.labels.to(device, non_blocking=True) for batch in batches]
    step_labels = None
    # With a single micro-batch the head gathers the step's labels itself.
    if len(labels) > 1:
        step_row_counts = (
            None
            if row_counts is None
            else [sum(counts) for counts in zip(*row_counts, strict=True)]
        )
        step_labels = head.world.gather_rows(torch.cat(labels), step_row_counts)
    loss = torch.zeros((), dtype=head.weight.dtype, device=device)
    parts: list[tuple[float, dict[str, Tensor]]] = []
    num_views = config.augment.num_views
    passes = [
        (index, view, share / num_views)
        for index, share in enumerate(shares)
        if share
        for view in range(num_views)
    ]
    copies = state.copies.iter_on_device(
        [_views(batches[index])[view] for index, view, _ in passes]
    )
    for number, ((index, view, share), images) in enumerate(zip(passes, copies, strict=True), 1):
        batch = batches[index]
        with nullcontext() if number == len(passes) else state.backbone.accumulating():
            embeddings = _embed(state, batch, view, images, config)
            weights = batch.weights
            output = head(
                embeddings,
                labels[index],
                state.step,
                weights=None if weights is None else weights.to(device, non_blocking=True),
                step_labels=step_labels,
                row_counts=None if row_counts is None else row_counts[index],
            )
            (share * output.loss).backward()
        # Each pass adds sparse gradient rows; from the second pass on, rows repeat.
        if number > 1:
            sum_duplicate_rows(head.weight)
        loss += share * output.loss.detach()
        parts.append((share, output.meters))
    return loss, _average_meters(parts)


def _embed(
    state: TrainState, batch: MicroBatch, view: int, images: Tensor, config: RunConfig
) -> Tensor:
    """Returns the embeddings of a view of the samples, [b, D]."""
    pixels = _recolor(images, batch, view, config)
    scales = branch_scales(config.model, batch.positions, config.seed, view)
    return state.backbone.embed(pixels, None if scales is None else scales.to(pixels))


def _views(batch: MicroBatch) -> tuple[Tensor, ...]:
    return (batch.images, *batch.more_views)


def _recolor(images: Tensor, batch: MicroBatch, view: int, config: RunConfig) -> Tensor:
    """Returns a view of the samples with its color augmentation, in floating point."""
    colors = draw_colors(batch.positions, config.augment, config.seed, view)
    return images.float() if colors is None else recolor(images.float(), colors)


def _drop_gradients(state: TrainState) -> None:
    for optimizer in state.optimizers:
        optimizer.zero_grad(set_to_none=True)


def _average_meters(parts: Sequence[tuple[float, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Averages meters weighted by share; NaN values (means over empty sets) are left out."""
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
