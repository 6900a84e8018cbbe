"""The contents of a checkpoint of two towers: both models, and the training state."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from mlcd.models.servable import Servable
from mlcd.models.servable_text import ServableText
from mlcd.models.text import TextTower
from mlcd.models.text_part import FOLDER
from mlcd.models.tokenizer import Tokenizer
from mlcd.models.two_towers import TwoTowers
from mlcd.models.vit import ViT
from mlcd.training.checkpoint.files import read_tensor_sizes, read_tensors
from mlcd.training.checkpoint.state_tensors import copy_to_host, restore_moments, select_prefix
from mlcd.training.pairs.pairs_state import PairState
from mlcd.types import Fingerprint

_Tower = TypeVar("_Tower", TextTower, ViT)
_AVERAGE: Final = "average."
_MOMENTS: Final = "moments."
_COUNTERS: Final = ("skipped_steps", "skipped_samples")


@dataclass(frozen=True)
class PairCopy:
    """A copy of the state in the host's memory.

    tensors: trained parameters, their moments and averages, and counters; on process 0 only. model,
    text: the towers, from which only frozen parameters are read.
    """

    step: int
    tensors: dict[str, Tensor]
    model: Servable
    text: TextTower


@dataclass(frozen=True)
class PairContents:
    """Writes and restores both towers. tokenizer: of the text tower."""

    tokenizer: Tokenizer

    def copy(self, state: PairState) -> PairCopy:
        tensors: dict[str, Tensor] = {}
        if state.world.rank == 0:
            tensors = {name: copy_to_host(tensor) for name, tensor in _iter_tensors(state)}
            tensors |= {name: torch.tensor(getattr(state, name)) for name in _COUNTERS}
        return PairCopy(state.step, tensors, state.model, state.texts.trunk)

    @torch.no_grad()
    def restore(self, state: PairState, directory: Path, step: int, group: Any) -> None:
        stored = read_tensor_sizes(directory)
        tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in stored.items()}
        read_tensors(tensors, directory, group)
        for name, parameter in state.iterate_trained():
            parameter.copy_(tensors[name])
            restore_moments(
                state.optimizer, parameter, select_prefix(tensors, f"{_MOMENTS}{name}.")
            )
        for name, average in _iter_averages(state):
            average.copy_(tensors[name])
        state.step = step
        for name in _COUNTERS:
            setattr(state, name, int(tensors[name]))

    def write(self, copy: PairCopy, directory: Path) -> Fingerprint:
        """Writes both towers in float32: averaged weights if there are any, and frozen weights."""
        scalars = select_prefix(copy.tensors, "scalar.")
        towers = TwoTowers(
            _build_tower(copy.model.trunk, _select_weights(copy, "image.")),
            _build_tower(copy.text, _select_weights(copy, "text.")),
            logit_scale=scalars["log_scale"],
            logit_bias=scalars.get("bias"),
        )
        model = Servable(towers.vision, copy.model.preprocess).eval()
        for name, part in (
            ("weights", model),
            (FOLDER, ServableText.of(towers, self.tokenizer)),
        ):
            folder = directory / name
            folder.mkdir()
            part.write(folder)
        return model.fingerprint()


def _iter_tensors(state: PairState) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in state.iterate_trained():
        yield name, parameter
        for kind, moment in state.optimizer.state.get(parameter, {}).items():
            yield f"{_MOMENTS}{name}.{kind}", moment
    yield from _iter_averages(state)


def _iter_averages(state: PairState) -> Iterator[tuple[str, Tensor]]:
    for tower, average in state.averages.items():
        for name, weight in average.weights.items():
            yield f"{_AVERAGE}{tower}.{name}", weight


def _select_weights(copy: PairCopy, tower: str) -> dict[str, Tensor]:
    return select_prefix(copy.tensors, _AVERAGE + tower) or select_prefix(copy.tensors, tower)


def _build_tower(like: _Tower, trained: Mapping[str, Tensor]) -> _Tower:
    """Returns a tower in float32 with the `trained` weights, and the other weights of `like`."""
    weights = {
        name: trained.get(name, parameter.detach()).float().cpu()
        for name, parameter in like.named_parameters()
    }
    with torch.device("meta"):
        tower = type(like)(like.config)
    tower.load_state_dict(weights, assign=True)
    return tower
