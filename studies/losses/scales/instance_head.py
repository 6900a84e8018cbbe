"""CLIP's and SigLIP's loss of a batch of pairs, with a learned scale and bias."""

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mlcd.losses.contrastive import clip_loss, siglip_loss
from mlcd.training.head.partial_fc import HeadOutput, make_scalar
from mlcd.world import World

_MAX_SCALE: Final = 100.0  # CLIP's limit


@dataclass(frozen=True)
class InstanceConfig:
    """The settings of the loss."""

    kind: Literal["instance_softmax", "instance_sigmoid"]
    scale: float
    learn_scale: bool = False
    bias: float = 0.0
    learn_bias: bool = False


class InstanceHead(nn.Module):
    """The loss of pairs, without class centers: each row is told from those of other pairs."""

    def __init__(self, config: InstanceConfig) -> None:
        super().__init__()
        self.config = config
        self.world = World()
        # The logarithm, so that no update makes the scale negative.
        self.log_scale = make_scalar(math.log(config.scale)) if config.learn_scale else None
        self.bias = make_scalar(config.bias) if config.learn_bias else None

    @property
    def scalars(self) -> dict[str, nn.Parameter]:
        """Returns the learned scale and bias by name."""
        named = {"log_scale": self.log_scale, "bias": self.bias}
        return {name: each for name, each in named.items() if each is not None}

    @torch.no_grad()
    def limit(self) -> None:
        """Limits a learned scale after an update, as CLIP does."""
        if self.log_scale is not None:
            self.log_scale.clamp_(max=math.log(_MAX_SCALE))

    def forward(self, rows: Tensor, others: Tensor) -> HeadOutput:
        """Computes the loss of the pairs of `rows` and `others`, [B, D] each, not yet unit."""
        rows, others = normalize(rows, dim=1), normalize(others, dim=1)
        scale, bias = self._scale_and_bias(rows)
        counts = (len(rows),)
        loss = (
            clip_loss(rows, others, scale, world=self.world, counts=counts)
            if self.config.kind == "instance_softmax"
            else siglip_loss(rows, others, scale, bias, world=self.world, counts=counts)
        )
        meters = _cosines(rows, others)
        for name, value in (("scale", scale), ("bias", bias)):
            if value.requires_grad:
                meters[name] = value.detach().clone()
        return HeadOutput(loss, meters)

    def _scale_and_bias(self, like: Tensor) -> tuple[Tensor, Tensor]:
        scale = like.new_tensor(self.config.scale)
        if self.log_scale is not None:
            scale = self.log_scale.exp()
        return scale, like.new_tensor(self.config.bias) if self.bias is None else self.bias


@torch.no_grad()
def _cosines(rows: Tensor, others: Tensor) -> dict[str, Tensor]:
    """Returns the mean cosines of pairs, and of rows of two pairs."""
    num, of_pairs = len(rows), (rows * others).sum()
    of_all = rows.sum(dim=0) @ others.sum(dim=0)
    return {
        "positive_cosine": of_pairs / num,
        "negative_cosine": (of_all - of_pairs) / (num * (num - 1)),
    }
