"""The servable form of a model, the same in export and service: uint8 pixels to unit embeddings."""

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
from mlcd.models.vit import Output, ViT, ViTConfig
from mlcd.types import Fingerprint

WEIGHTS: Final = "model.safetensors"
CONFIG: Final = "config.json"
PREPROCESS: Final = "preprocess.json"


class Servable(nn.Module):
    """A model from uint8 [B, 3, S, S] RGB to unit rows, float32 [B, D]; it applies preprocessing's
    mean and std itself.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, trunk: ViT, preprocess: PreprocessSpec) -> None:
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
        """Returns the embedding before its normalization (for training), or another output of the
        tower.
        """
        embedding: Tensor = self.trunk(self.normalize(image_u8), output)
        return embedding

    def normalize(self, image_u8: Tensor) -> Tensor:
        """Returns the trunk's input: pixels scaled to [0, 1], minus the mean, divided by std."""
        return (image_u8.float() / 255.0 - self.mean) / self.std

    def fingerprint(self) -> Fingerprint:
        """Returns the fingerprint of weights and preprocessing together; see
        `PreprocessSpec.fingerprint`.
        """
        return self.preprocess.fingerprint(self.weights_digest())

    def weights_digest(self) -> str:
        """Returns the SHA-256 of name, dtype, shape and bytes of every tensor, and of the config's
        fields that the tensors do not determine.
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
        """Reads the files of `write`.

        Raises ArtifactInvalid naming the file, and the tensor if one is missing or has the wrong
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
) -> ViT:
    """Returns a tower with these weights, in float32; see `fill` for `shown` and errors."""
    with torch.device("meta"):
        trunk = ViT(config)
    fill(trunk, state, source, shown=shown)
    return trunk


def fill(
    tower: nn.Module,
    state: Mapping[str, Tensor],
    source: str,
    *,
    shown: Callable[[str], str] = str,
) -> None:
    """Loads weights, in float32, into a tower on torch's meta device.

    shown: function from our name of a tensor to its name in the source, for errors. Float32 tensors
    are not copied, so that a large tower is in memory only once.

    Raises ArtifactInvalid naming `source` and the tensor that does not fit.
    """
    expected = tower.state_dict()
    remedy = "check that the config, or the name given with --like, belongs to these weights"
    for name in sorted(expected.keys() ^ state.keys()):
        problem = "is missing from" if name in expected else "does not belong to the tower in"
        raise ArtifactInvalid(f"tensor {shown(name)} {problem} {source}", remedy=remedy)
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise ArtifactInvalid(
                f"tensor {shown(name)} in {source} must have the shape"
                f" {list(expected[name].shape)}, got {list(tensor.shape)}",
                remedy=remedy,
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ArtifactInvalid(
                f"tensor {shown(name)} in {source} must be finite", remedy="restore the file"
            )
    tower.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
