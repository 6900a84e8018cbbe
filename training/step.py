"""One step: batch in, loss, gradients, update, meters out."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mlcd.errors import Diverged
from training.config import RunConfig
from training.optim.clip import clip_global_norm
from training.optim.schedule import learning_rate
from training.state import TrainState


@dataclass(frozen=True)
class Meters:
    """Scalar tensors of one step; read them only when they are logged."""

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
        return {**{name: value if math.isfinite(value) else None for name, value in values.items()}, "lr": self.lr}


def train_step(state: TrainState, images: Tensor, labels: Tensor, config: RunConfig) -> Meters:
    """Advance `state` by one update on float32 images [B, 3, S, S] (0..255) and labels [B, L].

    Raises Diverged before the update when loss or gradient is not finite.
    """
    lr = _set_learning_rate(state, config)
    state.model.train()
    output = state.centers(state.model.embed(images), labels, state.step)
    optimizers = (state.optimizer, state.center_optimizer)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    output.loss.backward()
    backbone, centers = list(state.model.trunk.parameters()), list(state.centers.parameters())
    max_norm = config.optim.clip_norm or float("inf")
    grad_norm, center_grad_norm = clip_global_norm(backbone, centers, max_norm, state.centers.world)
    loss = output.loss.detach()
    if not bool(torch.isfinite(loss + grad_norm + center_grad_norm)):
        raise Diverged(
            f"step {state.step}: loss {loss.item()}, gradient norm {grad_norm.item()} and {center_grad_norm.item()}",
            remedy="lower optim.lr or loss.scale; the last checkpoint is intact",
        )
    for optimizer in optimizers:
        optimizer.step()
    state.step += 1
    return Meters(loss, output.meters, grad_norm, center_grad_norm, lr)


def _set_learning_rate(state: TrainState, config: RunConfig) -> float:
    factor = learning_rate(
        state.step, peak=1.0, warmup_steps=config.optim.warmup_steps, num_steps=config.schedule.steps
    )
    for group in (*state.optimizer.param_groups, *state.center_optimizer.param_groups):
        group["lr"] = factor * group["peak_lr"]
    return factor * config.optim.lr
