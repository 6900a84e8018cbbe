"""Copies a training state to the host's memory, and restores it from files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Sharded
from torch.nn.functional import normalize

from mlcd.errors import ConfigInvalid
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import Servable
from mlcd.models.vit import ViT, ViTConfig
from mlcd.training.checkpoint.checkpoint_store import open_checkpoint
from mlcd.training.checkpoint.files import STATE, read_tensor_sizes, read_tensors
from mlcd.training.checkpoint.state_tensors import (
    copy_to_host,
    local_part,
    restore_moments,
    select_prefix,
    wrap_part,
)
from mlcd.training.head.shards import Shard
from mlcd.training.head.state import TrainState
from mlcd.world import World

_TRUNK: Final = "trunk."
_AVERAGE: Final = "average."
_MOMENTS: Final = "moments."
_SCALARS: Final = "head."
_CENTERS: Final = "centers."
_WEIGHT: Final = "centers.weight"
_COUNTERS: Final = ("skipped_steps", "skipped_samples")


@dataclass(frozen=True)
class Snapshot:
    """A copy of the state in the host's memory.

    tensors: sharded tensors as DTensors on every process; all others on process 0 only.
    """

    step: int
    config: ViTConfig
    preprocess: PreprocessSpec
    tensors: dict[str, Tensor]


def take_snapshot(state: TrainState) -> Snapshot:
    """Copies the state, so that training cannot change the copy; every process calls it."""
    world, mesh = state.head.world, _host_mesh(state.head.world)
    tensors: dict[str, Tensor] = {}
    for name, tensor in _backbone_tensors(state):
        if isinstance(tensor, DTensor):
            tensors[name] = wrap_part(tensor, copy_to_host(tensor.to_local()), mesh)
        elif world.rank == 0:
            tensors[name] = copy_to_host(tensor)
    for name, tensor, shard in _center_tensors(state):
        if tensor.dim():
            tensors[name] = _wrap_rows(copy_to_host(tensor), shard, mesh)
        # Dense AdamW has one step counter for all rows.
        elif world.rank == 0:
            tensors[name] = copy_to_host(tensor)
    if world.rank == 0:
        tensors |= {name: torch.tensor(getattr(state, name)) for name in _COUNTERS}
    return Snapshot(state.step, state.model.trunk.config, state.model.preprocess, tensors)


def restore(state: TrainState, directory: Path, step: int, group: Any) -> None:
    """Restores `state` from `directory`, bit for bit.

    Every process of `group` calls it; another number of processes may have written the files.
    Raises ConfigInvalid for another number of classes, ArtifactInvalid if a file is unreadable.
    """
    stored, mesh, shard = (
        read_tensor_sizes(directory),
        _host_mesh(state.head.world),
        state.head.shard,
    )
    num_classes = stored[_WEIGHT][0][0] if _WEIGHT in stored else 0
    if num_classes != shard.num_classes:
        raise ConfigInvalid(
            f"{directory} must contain centers of {shard.num_classes} classes, got {num_classes}",
            remedy="use the labels that the centers were trained with",
        )
    parameters: dict[str, Tensor] = dict(state.model.trunk.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, (size, dtype) in stored.items():
        parameter = parameters.get(_parameter_name(name))
        if name.startswith(_CENTERS) and size:
            tensors[name] = _wrap_rows(
                torch.empty((len(shard), *size[1:]), dtype=dtype), shard, mesh
            )
        elif isinstance(parameter, DTensor) and size:
            tensors[name] = wrap_part(
                parameter, torch.empty(parameter.to_local().shape, dtype=dtype), mesh
            )
        else:
            tensors[name] = torch.empty(size, dtype=dtype)
    read_tensors(tensors, directory, group)
    _set_state(state, {name: local_part(tensor) for name, tensor in tensors.items()}, step)


def load_checkpoint(state: TrainState, path: Path) -> None:
    """Restores `state` bit for bit from the checkpoint at `path`, in a run of one process.

    Raises ArtifactInvalid.
    """
    restore(state, path / STATE, open_checkpoint(path).config["step"], None)


def read_servable(snapshot: Snapshot, directory: Path) -> Servable:
    """Reads the model for export and evaluation, in float32, from the files of all processes.

    The weights are the moving average if the run has one.
    """
    with torch.device("meta"):
        trunk = ViT(snapshot.config)
    stored = read_tensor_sizes(directory)
    prefix = _AVERAGE if any(name.startswith(_AVERAGE) for name in stored) else _TRUNK
    sizes = {prefix + name: stored[prefix + name] for name, _ in trunk.named_parameters()}
    weights = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in sizes.items()}
    read_tensors(weights, directory, alone=True)
    trunk.load_state_dict(
        {name.removeprefix(prefix): tensor.float() for name, tensor in weights.items()}, assign=True
    )
    return Servable(trunk, snapshot.preprocess).eval()


def read_unit_centers(directory: Path) -> NDArray[np.float32]:
    """Reads the unit centers of all classes [K, D] from the files of all processes."""
    size, dtype = read_tensor_sizes(directory)[_WEIGHT]
    weight = torch.empty(size, dtype=dtype)
    read_tensors({_WEIGHT: weight}, directory, alone=True)
    unit: NDArray[np.float32] = normalize(weight.float(), dim=1).numpy()
    return unit


def _backbone_tensors(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    for prefix, name, parameter in _iterate_replicated(state):
        yield prefix + name, parameter
        for kind, moment in state.optimizer.state.get(parameter, {}).items():
            yield f"{_MOMENTS}{name}.{kind}", moment
    if state.average is not None:
        for name, weight in state.average.weights.items():
            yield _AVERAGE + name, weight


def _iterate_replicated(state: TrainState) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (prefix, name, parameter) of the tower and of a learned scale and bias."""
    for name, parameter in state.model.trunk.named_parameters():
        yield _TRUNK, name, parameter
    for name, parameter in state.head.scalars.items():
        yield _SCALARS, name, parameter


def _parameter_name(stored: str) -> str:
    """Returns the name of the parameter that a tensor of `_backbone_tensors` belongs to."""
    for prefix in (_TRUNK, _AVERAGE):
        if stored.startswith(prefix):
            return stored.removeprefix(prefix)
    return stored.removeprefix(_MOMENTS).rpartition(".")[0]


def _center_tensors(state: TrainState) -> Iterator[tuple[str, Tensor, Shard]]:
    """Yields the name, tensor and shard of the centers and their moments."""
    weight, shard = state.head.weight, state.head.shard
    yield _WEIGHT, weight, shard
    for kind, moment in state.center_optimizer.state.get(weight, {}).items():
        yield _CENTERS + kind, moment, shard


@torch.no_grad()
def _set_state(state: TrainState, tensors: Mapping[str, Tensor], step: int) -> None:
    for prefix, name, parameter in _iterate_replicated(state):
        local_part(parameter).copy_(tensors[prefix + name])
        restore_moments(state.optimizer, parameter, select_prefix(tensors, f"{_MOMENTS}{name}."))
    if state.average is not None:
        for name, average in state.average.weights.items():
            local_part(average).copy_(tensors[_AVERAGE + name])
    rows = select_prefix(tensors, _CENTERS)
    state.head.weight.copy_(rows.pop("weight"))
    restore_moments(state.center_optimizer, state.head.weight, rows)
    state.step = step
    for name in _COUNTERS:
        setattr(state, name, int(tensors[name]))


def _wrap_rows(local: Tensor, shard: Shard, mesh: DeviceMesh | None) -> Tensor:
    """Wraps the rows of `shard` as this process's part of a DTensor."""
    if mesh is None:
        return local
    shape = torch.Size([shard.num_classes, *local.shape[1:]])
    return DTensor.from_local(
        local, mesh, [Sharded(0)], run_check=False, shape=shape, stride=local.stride()
    )


def _host_mesh(world: World) -> DeviceMesh | None:
    return init_device_mesh("cpu", (world.size,)) if world.size > 1 else None
