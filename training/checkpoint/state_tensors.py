"""Converts the tensors of a training state for a checkpoint and back, whole or sharded."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def copy_to_host(tensor: Tensor) -> Tensor:
    """Returns a copy in the host's memory."""
    copy: Tensor = tensor.detach().to("cpu", copy=True).contiguous()
    return copy


def select_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names start with `prefix`, by their names without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def restore_moments(
    optimizer: torch.optim.Optimizer, parameter: Tensor, moments: Mapping[str, Tensor]
) -> None:
    """Sets the optimizer's moments of a parameter; empty moments change nothing."""
    if moments:
        # AdamW keeps its step counter on the CPU.
        optimizer.state[parameter] = {
            kind: moment if kind == "step" else _place_like(moment, parameter)
            for kind, moment in moments.items()
        }


def _place_like(local: Tensor, parameter: Tensor) -> Tensor:
    """Moves `local` to the parameter's device, as a DTensor if the parameter is one."""
    moved = local.to(local_part(parameter).device)
    return (
        wrap_part(parameter, moved, parameter.device_mesh)
        if isinstance(parameter, DTensor)
        else moved
    )


def wrap_part(sharded: DTensor, local: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Wraps `local` as this process's part of a tensor that is sharded as `sharded` is."""
    assert mesh is not None
    return DTensor.from_local(
        local,
        mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.size(),
        stride=sharded.stride(),
    )


def local_part(tensor: Tensor) -> Tensor:
    """Returns this process's part of a DTensor, or another tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
