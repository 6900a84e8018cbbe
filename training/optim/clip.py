"""One gradient norm over all parameters.

Replicated parameters count once, and center shards are summed over processes.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mlcd.world import World


def clip_global_norm(
    replicated: Iterable[Tensor], sharded: Iterable[Tensor], max_norm: float, world: World
) -> tuple[Tensor, Tensor]:
    """Scales all gradients by min(1, max_norm / norm), and returns the norms (replicated, sharded)
    before.

    replicated: parameters whose gradients are the same on every process, or sharded by torch
    (DTensor). sharded: parameters of which each process holds its own rows; sparse gradients are
    those of `mlcd.training.head.row_gradients.add_up`.
    """
    plain = [parameter for parameter in replicated if parameter.grad is not None]
    shards = [parameter for parameter in sharded if parameter.grad is not None]
    device = (plain or shards)[0].device
    local_square = _square(
        [parameter for parameter in plain if isinstance(parameter, DTensor)], device
    )
    whole_square = _square(
        [parameter for parameter in plain if not isinstance(parameter, DTensor)], device
    )
    summed_square, shard_square = world.sum(torch.stack([local_square, _square(shards, device)]))
    plain_square = whole_square + summed_square
    norm = (plain_square + shard_square).sqrt()
    # torch's clip_grad_norm_ has the same epsilon.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in (*plain, *shards):
        values = _values(parameter.grad)
        values.mul_(factor.to(values.dtype))
    return plain_square.sqrt(), shard_square.sqrt()


def _square(parameters: list[Tensor], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        total = total + _values(parameter.grad).double().square().sum()
    return total


def _values(gradient: Tensor | None) -> Tensor:
    """Returns the numbers of a gradient that this process holds."""
    assert gradient is not None
    if isinstance(gradient, DTensor):
        return gradient.to_local()
    # values() refuses a tensor that may have several entries of a row.
    return gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001
