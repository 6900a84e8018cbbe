"""One gradient norm over everything: replicated parameters counted once, center shards summed over processes."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mlcd.world import World


def clip_global_norm(
    replicated: Iterable[Tensor], sharded: Iterable[Tensor], max_norm: float, world: World
) -> tuple[Tensor, Tensor]:
    """Scale all gradients by min(1, max_norm / norm); return the norms before it, (replicated, sharded).

    replicated: parameters whose gradients are the same on every process, or sharded by torch (DTensor). sharded:
    parameters of which each process holds its own rows; sparse gradients are coalesced.
    """
    plain = [parameter for parameter in replicated if parameter.grad is not None]
    shards = [parameter for parameter in sharded if parameter.grad is not None]
    for parameter in shards:
        if parameter.grad.is_sparse:  # type: ignore[union-attr]
            parameter.grad = parameter.grad.coalesce()  # type: ignore[union-attr]
    device = (plain or shards)[0].device
    local_square = _square([each for each in plain if isinstance(each, DTensor)], device)
    whole_square = _square([each for each in plain if not isinstance(each, DTensor)], device)
    summed_square, shard_square = world.sum(torch.stack([local_square, _square(shards, device)]))
    plain_square = whole_square + summed_square
    norm = (plain_square + shard_square).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(
        max=1.0
    )  # torch's clip_grad_norm_ has the same epsilon
    for parameter in (*plain, *shards):
        gradient = _local(parameter.grad)
        gradient.mul_(factor.to(gradient.dtype))
    return plain_square.sqrt(), shard_square.sqrt()


def _square(parameters: list[Tensor], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        gradient = _local(parameter.grad)
        values = gradient.values() if gradient.is_sparse else gradient
        total = total + values.double().square().sum()
    return total


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
