"""Directories of two-tower models: both towers, the preprocessing of images and the tokenizer.

Reads directories of transformers (`CLIPModel`) and of open_clip; writes directories of
transformers.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from mlcd.errors import ConfigInvalid
from mlcd.images.transform import PreprocessSpec
from mlcd.models.configs import (
    read_hf_config,
    read_hf_preprocessing,
    read_open_clip_config,
    write_hf_preprocessing,
)
from mlcd.models.json_files import read_object
from mlcd.models.servable import WEIGHTS, fill, tower_of
from mlcd.models.tensor_files import read_tensors
from mlcd.models.text import TextConfig, TextTower
from mlcd.models.text_configs import (
    read_hf_text_config,
    read_open_clip_text_config,
    write_hf_two_tower_config,
)
from mlcd.models.tokenizer import Tokenizer
from mlcd.models.two_tower_checkpoints import (
    read_two_tower_state,
    write_two_tower_state,
)
from mlcd.models.two_towers import TwoTowers
from mlcd.models.vit import ViTConfig
from mlcd.models.weight_files import (
    HF_CONFIG,
    HF_PREPROCESSING,
    OPEN_CLIP_CONFIG,
    locate,
    weights_in,
)


@dataclass(frozen=True)
class TwoTowerModel:
    """Two towers, the preprocessing of their images and the tokenizer of their texts."""

    towers: TwoTowers
    preprocess: PreprocessSpec
    tokenizer: Tokenizer


def states_two_towers(folder: Path) -> bool:
    """Tells whether the configs in a directory describe a text tower and an image tower."""
    if (path := folder / OPEN_CLIP_CONFIG).is_file():
        model = read_object(path).get("model_cfg")
        return isinstance(model, dict) and isinstance(model.get("text_cfg"), dict)
    path = folder / HF_CONFIG
    return path.is_file() and read_object(path).get("model_type") == "clip"


def read_two_towers(spec: str) -> TwoTowerModel:
    """Reads the directory, or `hub:ORGANIZATION/MODEL`, of a two-tower model, in float32.

    Raises NotFound, ArtifactInvalid naming file and tensor, and ConfigInvalid if a config is
    missing or unsupported.
    """
    folder = locate(spec)
    vision, text, preprocess = _read_configs(folder)
    return TwoTowerModel(
        towers=_read_towers(weights_in(folder), vision, text),
        preprocess=preprocess,
        tokenizer=Tokenizer.read(folder, text.context_length),
    )


def write_two_towers(model: TwoTowerModel, folder: Path) -> None:
    """Writes the files of transformers' CLIPModel and its processors into an existing directory.

    Raises ConfigInvalid, before writing, if the class does not support the towers.
    """
    config = write_hf_two_tower_config(model.towers)
    state = {
        name: tensor.contiguous()
        for name, tensor in write_two_tower_state(model.towers, "clip").items()
    }
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    for name, content in (
        (HF_CONFIG, config),
        (HF_PREPROCESSING[0], write_hf_preprocessing(model.preprocess)),
    ):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    model.tokenizer.write(folder)


def _read_configs(folder: Path) -> tuple[ViTConfig, TextConfig, PreprocessSpec]:
    if (path := folder / OPEN_CLIP_CONFIG).is_file():
        vision, preprocess = read_open_clip_config(path)
        return vision, read_open_clip_text_config(path), preprocess
    if not (path := folder / HF_CONFIG).is_file():
        raise ConfigInvalid(
            f"{folder} must have a config of its towers, found none",
            remedy=f"put its {HF_CONFIG} or {OPEN_CLIP_CONFIG} beside the weights",
        )
    text = read_hf_text_config(path)
    vision = read_hf_config(path, projection=True)
    for name in HF_PREPROCESSING:
        if (folder / name).is_file():
            return vision, text, read_hf_preprocessing(folder / name)
    raise ConfigInvalid(
        f"{folder} lacks {HF_PREPROCESSING[0]}, so its preprocessing is unknown",
        remedy="add the file",
    )


def _read_towers(weights: Path, vision: ViTConfig, text: TextConfig) -> TwoTowers:
    state = read_two_tower_state(read_tensors(weights), str(weights))
    with torch.device("meta"):
        text_tower = TextTower(text)
    fill(text_tower, state.text, str(weights), shown=state.text_name)
    return TwoTowers(
        tower_of(vision, state.vision, str(weights), shown=state.vision_name),
        text_tower,
        logit_scale=state.logit_scale,
        logit_bias=state.logit_bias,
    ).eval()
