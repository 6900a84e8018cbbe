"""The servable form of a model, identical in export and service: uint8 pixels in, normalization,
trunk, unit embedding out.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from mlcd.errors import ArtifactInvalid
from mlcd.images.transform import PreprocessSpec
from mlcd.models.siglip import SiglipViT
from mlcd.models.vit import Output, VisionTower, ViT, ViTConfig
from mlcd.types import Fingerprint

WEIGHTS: Final = "model.safetensors"
CONFIG: Final = "config.json"
PREPROCESS: Final = "preprocess.json"


class Servable(nn.Module):
    """A model of uint8 [B, 3, S, S] RGB to float32 [B, D] of unit rows; the graph includes
    preprocessing's mean and std.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, trunk: VisionTower, preprocess: PreprocessSpec) -> None:
        super().__init__()
        self.trunk = trunk
        self.preprocess = preprocess
        self.register_buffer(
            "mean", torch.tensor(preprocess.mean).view(1, 3, 1, 1), persistent=False
        )
        self.register_buffer("std", torch.tensor(preprocess.std).view(1, 3, 1, 1), persistent=False)

    def forward(self, image_u8: Tensor) -> Tensor:
        return functional.normalize(self.embed(image_u8).float(), dim=1)

    def embed(self, image_u8: Tensor, output: Output | None = None) -> Tensor:
        """Returns the embedding before it is normalized, as training takes it, or another output of
        the tower.
        """
        embedding: Tensor = self.trunk(self.normalize(image_u8), output)
        return embedding

    def normalize(self, image_u8: Tensor) -> Tensor:
        """Returns the pixels as the trunk takes them."""
        return (image_u8.float() / 255.0 - self.mean) / self.std

    def fingerprint(self) -> Fingerprint:
        """Returns the fingerprint of weights and preprocessing together; see
        `PreprocessSpec.fingerprint`.
        """
        return self.preprocess.fingerprint(self.weights_digest())

    def weights_digest(self) -> str:
        """Returns the SHA-256 over name, dtype, shape and bytes of every tensor, and over the parts
        of the config that these do not show.
        """
        sha256 = hashlib.sha256()
        config = self.trunk.config
        sha256.update(f"{config.heads}\0{config.activation}\0{config.norm_eps!r}\0".encode())
        for name, tensor in sorted(self.trunk.state_dict().items()):
            content = tensor.detach().cpu().contiguous()
            sha256.update(f"{name}\0{content.dtype}\0{list(content.shape)}\0".encode())
            sha256.update(
                content.view(torch.uint8).numpy().tobytes()
                if content.dim()
                else bytes(content.untyped_storage())
            )
        return sha256.hexdigest()

    def write(self, directory: Path) -> None:
        """Writes model.safetensors, config.json and preprocess.json into an existing directory."""
        state = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in self.trunk.state_dict().items()
        }
        save_file(state, directory / WEIGHTS)
        (directory / CONFIG).write_text(
            json.dumps(self.trunk.config.to_dict(), indent=2, sort_keys=True) + "\n"
        )
        (directory / PREPROCESS).write_text(self.preprocess.to_json())

    @classmethod
    def read(cls, directory: Path) -> "Servable":
        """Reads what `write` wrote.

        Raises ArtifactInvalid naming the file, and the tensor where one is missing or has another
        shape.
        """
        try:
            config = ViTConfig.from_dict(json.loads((directory / CONFIG).read_text()))
            state = load_file(directory / WEIGHTS)
        except (OSError, ValueError, SafetensorError) as error:
            raise ArtifactInvalid(
                f"the weights in {directory} cannot be read", remedy=f"it needs {WEIGHTS}, {CONFIG}"
            ) from error
        trunk = tower_of(config, state, str(directory / WEIGHTS))
        return cls(trunk, PreprocessSpec.read(directory / PREPROCESS)).eval()


def tower_of(
    config: ViTConfig,
    state: Mapping[str, Tensor],
    source: str,
    *,
    shown: Callable[[str], str] = str,
) -> VisionTower:
    """Returns a tower with these weights, in float32.

    shown and errors are those of `fill`.
    """
    with torch.device("meta"):
        trunk = ViT(config) if config.pooling == "class_token" else SiglipViT(config)
    fill(trunk, state, source, shown=shown)
    return trunk


def fill(
    tower: nn.Module,
    state: Mapping[str, Tensor],
    source: str,
    *,
    shown: Callable[[str], str] = str,
) -> None:
    """Gives a tower on torch's meta device these weights, in float32.

    shown: returns the name of one of our tensors in the source. Tensors that are float32 already
    are taken over, not copied, so that a large tower is in memory once.

    Raises ArtifactInvalid naming `source` and the tensor that does not fit.
    """
    expected = tower.state_dict()
    remedy = "does the config, or the name given with --like, belong to it?"
    for name in sorted(expected.keys() ^ state.keys()):
        where = "is missing from" if name in expected else "is not known in"
        raise ArtifactInvalid(f"tensor {shown(name)} {where} {source}", remedy=remedy)
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise ArtifactInvalid(
                f"tensor {shown(name)} in {source} is {list(tensor.shape)}, not"
                f" {list(expected[name].shape)}",
                remedy=remedy,
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ArtifactInvalid(
                f"tensor {shown(name)} in {source} is not finite", remedy="restore the file"
            )
    tower.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
