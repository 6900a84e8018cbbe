"""Instance discrimination over views: those of an image are told from those of all other images of
the step, on all processes.

A pair of views a, b of the global batch has CLIP's softmax in both directions or SigLIP's sigmoid
(`mlcd.losses.contrastive`). With two views there is one pair. With more, the loss is the mean over
all pairs that have at least one global view, as in multi-crop.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mlcd.losses.contrastive import clip_loss, siglip_loss
from mlcd.world import World
from training.config import InstanceKind, LossConfig
from training.head.partial_fc import HeadOutput, learned

_CLIP_SCALE: Final = 1 / 0.07
_SIGLIP_SCALE: Final = 10.0
_MAX_SCALE: Final = 100.0  # CLIP's limit


@dataclass(frozen=True)
class InstanceConfig:
    """The settings of the loss; see `training.config.LossConfig` for their meaning."""

    kind: InstanceKind
    scale: float
    learn_scale: bool = False
    bias: float = 0.0
    learn_bias: bool = False

    @classmethod
    def of(cls, loss: LossConfig, batch_size: int) -> Self:
        """Returns the settings of the loss of views; a default depends on the batch."""
        softmax = loss.kind == "instance_softmax"
        bias = 0.0 if softmax else -math.log(max(1, batch_size - 1))
        return cls(
            kind="instance_softmax" if softmax else "instance_sigmoid",
            scale=loss.scale or (_CLIP_SCALE if softmax else _SIGLIP_SCALE),
            learn_scale=loss.learn_scale,
            bias=bias if loss.bias is None else loss.bias,
            learn_bias=loss.learn_bias,
        )


class InstanceHead(nn.Module):
    """The loss of the views of the global batch, without class centers.

    The gradients of the embeddings are scaled so that DDP's average over processes is the gradient
    of the global loss; that of a learned scale or bias is complete on every process.
    """

    def __init__(self, config: InstanceConfig, *, world: World | None = None) -> None:
        super().__init__()
        self.config = config
        self.world = world or World()
        # The logarithm, so that no update makes the scale negative.
        self.log_scale = learned(math.log(config.scale)) if config.learn_scale else None
        self.bias = learned(config.bias) if config.learn_bias else None

    @property
    def scalars(self) -> dict[str, nn.Parameter]:
        """Returns the learned scale and bias by name, the same on every process."""
        named = {"log_scale": self.log_scale, "bias": self.bias}
        return {name: each for name, each in named.items() if each is not None}

    @torch.no_grad()
    def limit(self) -> None:
        """Limits a learned scale after an update, as CLIP does."""
        if self.log_scale is not None:
            self.log_scale.clamp_(max=math.log(_MAX_SCALE))

    def forward(
        self, views: Sequence[Tensor], num_global: int, row_counts: Sequence[int] | None = None
    ) -> HeadOutput:
        """Computes the loss of the global batch from this process's samples.

        views: for each view [B_local, D] of any length, the first `num_global` of them global.
        row_counts: the samples of each process; None asks them.
        """
        world = self.world
        with torch.autocast(views[0].device.type, enabled=False):
            wide = [each if each.dtype == torch.float64 else each.float() for each in views]
            unit = [normalize(each, dim=1) for each in wide]
            counts = row_counts or world.row_counts(len(unit[0]), unit[0].device)
            scale, bias = self._scale_and_bias(unit[0])
            pairs = [(a, b) for a in range(num_global) for b in range(a + 1, len(unit))]
            losses = [
                clip_loss(unit[a], unit[b], scale, world=world, counts=counts)
                if self.config.kind == "instance_softmax"
                else siglip_loss(unit[a], unit[b], scale, bias, world=world, counts=counts)
                for a, b in pairs
            ]
            own = torch.stack(losses).mean()
            whole = world.sum(own.detach()) / world.size
            meters = _cosines(unit, pairs, sum(counts), world)
            for name, value in (("scale", scale), ("bias", bias)):
                if value.requires_grad:
                    meters[name] = value.detach().clone()
            return HeadOutput(own + (whole - own.detach()), meters)

    def _scale_and_bias(self, like: Tensor) -> tuple[Tensor, Tensor]:
        scale = like.new_tensor(self.config.scale)
        if self.log_scale is not None:
            scale = _averaged(self.log_scale, self.world).exp()
        if self.bias is not None:
            return scale, _averaged(self.bias, self.world)
        return scale, like.new_tensor(self.config.bias)


def _averaged(parameter: Tensor, world: World) -> Tensor:
    """Returns the parameter itself, with a gradient that is averaged over processes.

    Each process has the part of the gradient that its own rows give.
    """
    same = parameter.view_as(parameter)
    if world.size > 1 and same.requires_grad:
        same.register_hook(lambda gradient: world.sum(gradient) / world.size)
    return same


@torch.no_grad()
def _cosines(
    unit: Sequence[Tensor], pairs: Sequence[tuple[int, int]], num: int, world: World
) -> dict[str, Tensor]:
    """Returns the mean cosines of pairs, and of views of two images."""
    own = torch.stack([(unit[a] * unit[b]).sum() for a, b in pairs])
    sums = world.sum(torch.cat([own, *(each.sum(dim=0) for each in unit)]))
    of_pairs, totals = sums[: len(pairs)], sums[len(pairs) :].view(len(unit), -1)
    all_pairs = torch.stack([totals[a] @ totals[b] for a, b in pairs])
    return {
        "positive_cosine": of_pairs.mean() / num,
        "negative_cosine": (all_pairs - of_pairs).mean() / (num * (num - 1)),
    }
