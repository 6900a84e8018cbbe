"""The text part of a model artifact: the folder `text/`, read without torch.

model.onnx         ids int64 [N, T] to embedding float32 [N, D], unit rows; N and T are free
tokenizer.json     the tokenizer, with its padding, its truncation and all that it does to a text
config.json        `TextSettings`
model.safetensors  the tower's weights, where our own class can run it
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file

from mlcd.errors import ArtifactInvalid

FOLDER: Final = "text"
GRAPH: Final = "model.onnx"
# beside the graph: the weights of a graph that a protobuf file cannot hold
GRAPH_DATA: Final = "model.onnx.data"
SETTINGS: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
WEIGHTS: Final = "model.safetensors"
# of the model of texts that stands in Triton beside that of images
TEXT_SUFFIX: Final = "-text"


class TextSettings(BaseModel):
    """The facts about a text tower that its graph and its tokenizer do not state.

    tower: what it is. pad_id: the token that fills rows. trims_padding: whether rows stay the same
    without the padding at their end. logit_scale: the logarithm of the factor of cosines.
    logit_bias: that of SigLIP. transformer: the sizes of our own class, where that can run it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tower: Literal["clip", "siglip", "mixture", "ridge"]
    context_length: int = Field(ge=1)
    pad_id: int = Field(ge=0)
    trims_padding: bool
    dimension: int = Field(ge=1)
    logit_scale: float
    logit_bias: float | None = None
    transformer: dict[str, Any] | None = None

    def write(self, folder: Path) -> None:
        text = json.dumps(self.model_dump(), indent=2, sort_keys=True) + "\n"
        (folder / SETTINGS).write_text(text)

    @classmethod
    def read(cls, folder: Path) -> "TextSettings":
        """Reads config.json; raises ArtifactInvalid where it is missing or damaged."""
        path = folder / SETTINGS
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ArtifactInvalid(f"{path} cannot be read", remedy="restore the file") from error
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise ArtifactInvalid(
                f"{path}: {name} {first['msg'].lower()}", remedy="restore the file"
            ) from error


def text_digest(folder: Path) -> str:
    """Returns the SHA-256 that identifies the text part in `folder`.

    It covers settings and tokenizer as canonical JSON, and the tower: name, dtype, shape and bytes
    of every tensor, or, without weights, the bytes of the graph. Raises ArtifactInvalid
    where a file is missing or damaged.
    """
    sha256 = hashlib.sha256()
    try:
        for name in (SETTINGS, TOKENIZER):
            content = json.dumps(json.loads((folder / name).read_bytes()), sort_keys=True)
            sha256.update(f"{name}\0{content}\0".encode())
        for part in _tower_bytes(folder):
            sha256.update(part)
    except (OSError, ValueError, SafetensorError) as error:
        raise ArtifactInvalid(
            f"the text tower in {folder} cannot be read", remedy="export the model again"
        ) from error
    return sha256.hexdigest()


def _tower_bytes(folder: Path) -> Iterator[bytes]:
    if (folder / WEIGHTS).is_file():
        for name, tensor in sorted(load_file(folder / WEIGHTS).items()):
            yield f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode()
            yield tensor.tobytes()
        return
    yield (folder / GRAPH).read_bytes()
    if (folder / GRAPH_DATA).is_file():
        yield (folder / GRAPH_DATA).read_bytes()


def digest_of_both(images: str, text: str) -> str:
    """Returns what identifies the weights of a model that has both towers, of the digest of each.

    The fingerprint is made of it and of the preprocessing: `PreprocessSpec.fingerprint`.
    """
    return hashlib.sha256(f"{images}{text}".encode()).hexdigest()
