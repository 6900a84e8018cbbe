"""The tower of a run: its initial weights, and which of its parameters are trained."""

from typing import Final

import torch

from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import Servable
from mlcd.models.vit import ViT
from mlcd.randomness import Stream, hash_counters
from mlcd.training.start import Start, at_image_size
from mlcd.training.tower_config import TowerConfig

_AFTER_BLOCKS: Final = ("norm_post.", "proj.")


def initial_model(config: TowerConfig, seed: int, start: Start | None = None) -> Servable:
    """Returns the tower at step 0, on the CPU: the start's, or random weights from the seed."""
    if start is not None:
        return at_image_size(start.model, config.image_size)
    trunk = ViT(config.vit())
    trunk.initialize(torch.Generator().manual_seed(int(hash_counters(seed, Stream.TOWER)[0])))
    size = config.image_size
    return Servable(trunk, PreprocessSpec(resize_shortest=size, crop=size))


def freeze(trunk: ViT, config: TowerConfig) -> None:
    """Turns off gradients for the parameters that `config.freeze` excludes from training."""
    for name, parameter in trunk.named_parameters():
        parameter.requires_grad_(is_trained(name, config))


def is_trained(name: str, config: TowerConfig) -> bool:
    """Returns True if a parameter of the tower is trained."""
    if isinstance(config.freeze, str):
        return False
    return config.freeze == 0 or layer_of(name, config.depth) > config.freeze


def layer_of(name: str, depth: int) -> int:
    """Returns the layer of a parameter: 0 before the blocks, i + 1 in block i, `depth` + 1 after
    them.
    """
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return depth + 1 if name.startswith(_AFTER_BLOCKS) else 0
