"""One step: batch in, loss, gradients, update, meters out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mlcd.errors import Diverged
from mlcd.losses.discrimination import cd_loss, mlc_loss, mlcd_loss
from training.config import LossConfig, RunConfig
from training.optim.schedule import learning_rate
from training.state import TrainState


@dataclass(frozen=True)
class Meters:
    """Scalar tensors of one step; read them only when they are logged."""

    loss: Tensor
    positive_cosine: Tensor
    negative_cosine: Tensor
    grad_norm: Tensor
    lr: float

    def to_dict(self) -> dict[str, float]:
        return {
            "loss": float(self.loss),
            "positive_cosine": float(self.positive_cosine),
            "negative_cosine": float(self.negative_cosine),
            "grad_norm": float(self.grad_norm),
            "lr": self.lr,
        }


def train_step(state: TrainState, images: Tensor, labels: Tensor, config: RunConfig) -> Meters:
    """Advance `state` by one update on float32 images [B, 3, S, S] (0..255) and labels [B, L].

    Raises Diverged before the update when loss or gradient is not finite.
    """
    lr = _set_learning_rate(state, config)
    state.model.train()
    embeddings = state.model.embed(images)
    positive, negative, positive_cosines, negative_cosines = state.centers(embeddings, labels, state.step)
    loss = _loss(config.loss, positive, negative)
    state.optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    parameters = list(state.named_parameters().values())
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.optim.clip_norm or float("inf"))
    if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(grad_norm)):
        raise Diverged(
            f"step {state.step}: loss {loss.item()}, gradient norm {grad_norm.item()}",
            remedy="lower optim.lr or loss.scale; the last checkpoint is intact",
        )
    state.optimizer.step()
    state.step += 1
    return Meters(loss.detach(), positive_cosines.nanmean(), negative_cosines.nanmean(), grad_norm.detach(), lr)


def _loss(config: LossConfig, positive: Tensor, negative: Tensor) -> Tensor:
    if config.kind == "mlcd":
        return mlcd_loss(positive, negative, bias=config.bias)
    return mlc_loss(positive, negative) if config.kind == "mlc" else cd_loss(positive, negative)


def _set_learning_rate(state: TrainState, config: RunConfig) -> float:
    factor = learning_rate(
        state.step, peak=1.0, warmup_steps=config.optim.warmup_steps, num_steps=config.schedule.steps
    )
    for group in state.optimizer.param_groups:
        group["lr"] = factor * group["peak_lr"]
    return factor * config.optim.lr
