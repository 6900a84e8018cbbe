"""The moving average of the tower's weights, which is evaluated and exported."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class WeightAverage:
    """The average of each weight, with the weight's device, dtype and sharding."""

    decay: float
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, trunk: nn.Module, decay: float) -> Self:
        """Returns the average at step 0: a copy of the weights."""
        weights = {name: parameter.detach().clone() for name, parameter in trunk.named_parameters()}
        return cls(decay, weights)

    @torch.no_grad()
    def update(self, trunk: nn.Module, step: int) -> None:
        """Updates the averages with the weights after update number `step`, counted from 0."""
        averages = [_local(weight) for weight in self.weights.values()]
        latest = [_local(weight) for weight in trunk.parameters()]
        torch._foreach_lerp_(averages, latest, 1.0 - decay_at(step, self.decay))


def decay_at(step: int, decay: float) -> float:
    """Returns the decay of an update; it is small at first, to forget the initial weights."""
    return min(decay, (1 + step) / (10 + step))


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
