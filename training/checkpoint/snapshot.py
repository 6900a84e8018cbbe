"""A training state copied to the memory of the host, and as files that any number of processes can read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize

from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import WEIGHTS, Servable
from mlcd.models.vit import ViT, ViTConfig
from training.parallel.backbone import placed_like, whole
from training.parallel.shards import Shard, load_rows, rows_path, save_rows
from training.state import TrainState

STATE: Final = "state.safetensors"
HEAD: Final = "head"
_CENTERS: Final = "centers."
_COUNTERS: Final = ("skipped_steps", "skipped_samples")


@dataclass(frozen=True)
class Snapshot:
    """trunk, rest: of the backbone, whole, on process 0 only. rows: centers and their moments, this process's own."""

    step: int
    config: ViTConfig
    preprocess: PreprocessSpec
    trunk: dict[str, Tensor]
    rest: dict[str, Tensor]
    shard: Shard
    rows: dict[str, Tensor]

    def servable(self) -> Servable:
        """What export and evaluation read, in float32."""
        with torch.device("meta"):
            trunk = ViT(self.config)
        trunk.load_state_dict({name: tensor.float() for name, tensor in self.trunk.items()}, assign=True)
        return Servable(trunk, self.preprocess).eval()


def take_snapshot(state: TrainState) -> Snapshot:
    """A copy that training does not change; every process calls it."""
    first = state.centers.world.rank == 0
    trunk: dict[str, Tensor] = {}
    rest = {name: torch.tensor(getattr(state, name)) for name in _COUNTERS}
    for name, parameter in state.model.trunk.named_parameters():
        for kind, tensor in {"": parameter, **state.optimizer.state.get(parameter, {})}.items():
            full = whole(tensor)
            if first:
                (rest if kind else trunk)[f"{name}.{kind}" if kind else name] = _copied(full)
    rest |= {f"exact.{name}": tensor for name, tensor in trunk.items() if tensor.dtype != torch.float32}
    weight = state.centers.weight
    rows = {"weight": _copied(weight)}
    for kind, moment in state.center_optimizer.state.get(weight, {}).items():
        if moment.dim():
            rows[kind] = _copied(moment)
        else:  # dense AdamW has one clock for all rows
            rest[_CENTERS + kind] = _copied(moment)
    model = state.model
    return Snapshot(state.step, model.trunk.config, model.preprocess, trunk, rest, state.centers.shard, rows)


def write_rows(snapshot: Snapshot, directory: Path) -> None:
    """This process's part, from which `unit_centers` and `restore` read."""
    save_rows(directory / HEAD, snapshot.shard, snapshot.rows)


def write_rest(snapshot: Snapshot, path: Path) -> None:
    save_file(snapshot.rest, path)


def unit_centers(directory: Path, num_classes: int, num_processes: int) -> NDArray[np.float32]:
    """The unit centers of all classes [K, D], read from the rows of one process after the other."""
    shards = [Shard.of(rank, num_processes, num_classes) for rank in range(num_processes)]
    unit: NDArray[np.float32] | None = None
    for shard in shards:
        rows = load_file(rows_path(directory / HEAD, shard))["weight"].float()
        if unit is None:
            unit = np.empty((num_classes, rows.shape[1]), dtype=np.float32)
        unit[shard.start : shard.stop] = normalize(rows, dim=1).numpy()
    assert unit is not None
    return unit


@torch.no_grad()
def restore(state: TrainState, directory: Path, step: int) -> None:
    """Put what `directory` holds into `state`, bit for bit; the processes may be more or fewer than those that wrote.

    Raises ConfigInvalid for another number of classes, ArtifactInvalid for missing rows.
    """
    rest = load_file(directory / STATE)
    trunk = load_file(directory / "weights" / WEIGHTS)
    rows = load_rows(directory / HEAD, state.centers.shard)
    for name, parameter in state.model.trunk.named_parameters():
        parameter.copy_(placed_like(rest.get(f"exact.{name}", trunk[name]), parameter))
        _restore_moments(state.optimizer, parameter, _with_prefix(rest, f"{name}."))
    weight = state.centers.weight
    weight.copy_(rows.pop("weight"))
    _restore_moments(state.center_optimizer, weight, rows | _with_prefix(rest, _CENTERS))
    state.step = step
    for name in _COUNTERS:
        setattr(state, name, int(rest[name]))


def _restore_moments(optimizer: torch.optim.Optimizer, parameter: Tensor, moments: Mapping[str, Tensor]) -> None:
    if moments:
        # AdamW keeps its step counter on the CPU.
        optimizer.state[parameter] = {
            kind: placed_like(moment, parameter) if moment.dim() else moment for kind, moment in moments.items()
        }


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) and "." not in name.removeprefix(prefix)
    }


def _copied(tensor: Any) -> Tensor:
    copied: Tensor = tensor.detach().to("cpu", copy=True).contiguous()
    return copied
