"""Clips the gradients by one norm over all parameters of all processes."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mlcd.world import World


def clip_global_norm(
    replicated: Iterable[Tensor], sharded: Iterable[Tensor], max_norm: float, world: World
) -> tuple[Tensor, Tensor]:
    """Scales all gradients by min(1, max_norm / norm); returns the norms (replicated, sharded)
    before scaling.

    replicated: parameters with the same gradient on every process, which count once, or DTensors.
    sharded: center rows of this process, whose squares are summed over processes; sparse gradients
    must be as `mlcd.training.head.row_gradients.sum_duplicate_rows` returns them.
    """
    tower = [parameter for parameter in replicated if parameter.grad is not None]
    shards = [parameter for parameter in sharded if parameter.grad is not None]
    device = (tower or shards)[0].device
    dtensor_square = _square(
        [parameter for parameter in tower if isinstance(parameter, DTensor)], device
    )
    whole_square = _square(
        [parameter for parameter in tower if not isinstance(parameter, DTensor)], device
    )
    summed_square, shard_square = world.sum(torch.stack([dtensor_square, _square(shards, device)]))
    replicated_square = whole_square + summed_square
    norm = (replicated_square + shard_square).sqrt()
    # torch's clip_grad_norm_ has the same epsilon.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in (*tower, *shards):
        values = _values(parameter.grad)
        values.mul_(factor.to(values.dtype))
    return replicated_square.sqrt(), shard_square.sqrt()


def _square(parameters: list[Tensor], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        total = total + _values(parameter.grad).double().square().sum()
    return total


def _values(gradient: Tensor | None) -> Tensor:
    """Returns the gradient values that this process stores."""
    assert gradient is not None
    if isinstance(gradient, DTensor):
        return gradient.to_local()
    # values() refuses a sparse tensor that is not marked as coalesced.
    return gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001
