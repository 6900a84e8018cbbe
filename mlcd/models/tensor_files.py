"""Reads tensors from files of weights: safetensors, or pickles that contain only tensors."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.models.weight_files import read_index, weight_files

_PICKLED: Final = (".bin", ".pt", ".pth")
_NESTED: Final = ("state_dict", "model")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file of weights, or of all shards of an index.

    Raises ArtifactInvalid naming a shard that lacks tensors listed in the index.
    """
    index = read_index(path) or {}
    state: dict[str, Tensor] = {}
    for file in weight_files(path):
        tensors = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickled(file)
        _check_complete(file, tensors, index, path.name)
        state |= tensors
    return state


def _check_complete(
    file: Path, tensors: Mapping[str, Tensor], index: Mapping[str, str], index_name: str
) -> None:
    missing = [name for name, shard in index.items() if shard == file.name and name not in tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ArtifactInvalid(
            f"{file} lacks the tensor {missing[0]}{more}, which {index_name} lists there",
            remedy="restore both files from one version of the model",
        )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        state: dict[str, Tensor] = load_file(path)
        return state
    except (OSError, SafetensorError) as error:
        raise ArtifactInvalid(
            f"{path} cannot be read as safetensors: it is missing, cut short or damaged",
            remedy="restore the file",
        ) from error


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """Reads only tensors: torch refuses a pickle that would run code, before running it."""
    if path.suffix not in _PICKLED:
        raise ConfigInvalid(
            f"weights must be in a file of .safetensors, {', '.join(_PICKLED)}, got {path}"
        )
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        if "TorchScript" in str(error):
            raise ArtifactInvalid(
                f"{path} is a TorchScript archive: a program, not only weights",
                remedy="if you trust it, save its state_dict() with safetensors and give that file",
            ) from error
        raise ArtifactInvalid(
            f"{path} cannot be read as weights: it is damaged or contains more than tensors",
            remedy="restore it, or save its state_dict() with safetensors",
        ) from error
    for name in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not all(
        isinstance(value, Tensor) for value in content.values()
    ):
        raise ArtifactInvalid(
            f"{path} must hold a state dict of tensors",
            remedy="save the model's state_dict() and give that file",
        )
    return dict(content)
