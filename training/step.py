"""One step: micro-batches in, loss, gradients, update, meters out."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from training.config import RunConfig
from training.optim.clip import clip_global_norm
from training.optim.schedule import learning_rate
from training.state import TrainState


class MicroBatch(Protocol):
    """See `training.data.loader.Batch`."""

    @property
    def images(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...


@dataclass(frozen=True)
class Meters:
    """Scalar tensors of one step, over all processes; read them only when they are logged."""

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
        # JSON knows no NaN: a mean over nothing (no positive, no negative) is null.
        values = {name: tensor.item() for name, tensor in tensors.items()}
        return {
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
            "lr": self.lr,
        }


class NotFinite(Exception):
    """Loss or gradient is not finite: nothing was updated, the gradients are dropped; the same on all processes."""

    def __init__(self, meters: Meters) -> None:
        super().__init__("not finite")
        self.meters = meters


def on_device(parts: Sequence[MicroBatch], device: torch.device) -> Iterator[Tensor]:
    """The images of one micro-batch at a time, so that only one is on the device as floating-point numbers."""
    for part in parts:
        yield part.images.to(device, non_blocking=True).float()


def train_step(
    state: TrainState,
    images: Iterable[Tensor],
    labels: Sequence[Tensor],
    shares: Sequence[float],
    config: RunConfig,
) -> Meters:
    """One update of `state` by micro-batches: float images [b, 3, S, S] (0..255), labels int64 [b, L], shares.

    shares: each micro-batch's share of the global step, the same on all processes; one with no share is left out.
    `state.step` is not advanced. Raises NotFinite before the update.
    """
    lr = _set_learning_rate(state, config)
    if not any(shares):  # no sample of the step could be used
        nothing = torch.tensor(math.nan)
        return Meters(nothing, {}, nothing, nothing, lr)
    loss, head = backward(state, images, labels, shares)
    backbone, centers = list(state.model.trunk.parameters()), list(state.centers.parameters())
    max_norm = config.optim.clip_norm or float("inf")
    norms = clip_global_norm(backbone, centers, max_norm, state.centers.world)
    meters = Meters(loss, head, *norms, lr)
    finite = torch.isfinite(loss) & torch.isfinite(norms[0]) & torch.isfinite(norms[1])
    # The one read by the host. The maximum, so that all decide alike whatever each has seen.
    if bool(state.centers.world.max(torch.where(finite, 0.0, 1.0))):
        _drop_gradients(state)
        raise NotFinite(meters)
    for optimizer in state.optimizers:
        optimizer.step()
    _drop_gradients(state)
    return meters


def backward(
    state: TrainState, images: Iterable[Tensor], labels: Sequence[Tensor], shares: Sequence[float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients of the global mean loss, averaged over processes, in `state`'s parameters; the loss and meters."""
    world, device = state.centers.world, state.centers.weight.device
    # With one micro-batch the head gathers the step's labels itself.
    step_labels = world.gather_rows(torch.cat(list(labels))) if len(labels) > 1 else None
    state.model.train()
    _drop_gradients(state)
    loss = torch.zeros((), dtype=state.centers.weight.dtype, device=device)
    parts: list[tuple[float, dict[str, Tensor]]] = []
    last = max((index for index, share in enumerate(shares) if share), default=-1)
    for index, (pixels, ids, share) in enumerate(zip(images, labels, shares, strict=True)):
        if share == 0.0:
            continue
        with nullcontext() if index == last else state.backbone.accumulating():
            output = state.centers(
                state.backbone.embed(pixels), ids, state.step, step_labels=step_labels
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
    """By share; of a mean over nothing (NaN), over the micro-batches that have something."""
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
