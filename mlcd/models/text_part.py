"""The text part of a model artifact: the folder `text/`, read without torch.

model.onnx         ids int64 [N, T] to unit rows float32 [N, D]; N and T are dynamic
tokenizer.json     the tokenizer, with its normalization, padding and truncation
config.json        `TextSettings`
model.safetensors  the tower's weights, if our own class can run it
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
# the weights of a graph that is too large for one protobuf file
GRAPH_DATA: Final = "model.onnx.data"
SETTINGS: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
WEIGHTS: Final = "model.safetensors"
# the suffix of the text model's name in Triton, after the image model's name
TEXT_SUFFIX: Final = "-text"


class TextSettings(BaseModel):
    """The facts about a text tower that are neither in its graph nor in its tokenizer.

    tower: kind of the tower. pad_id: id of the padding token. trims_padding: whether embeddings
    stay the same without the padding at the end of a row. logit_scale: logarithm of the factor of
    cosines. logit_bias: SigLIP's bias. transformer: config of our own class, if it can run the
    tower.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tower: Literal["clip", "siglip", "traced", "mixture", "ridge"]
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
        """Reads config.json; raises ArtifactInvalid if it is missing or damaged."""
        path = folder / SETTINGS
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ArtifactInvalid(f"{path} cannot be read", remedy="restore the file") from error
        except ValidationError as error:
            details = error.errors()[0]
            name = ".".join(str(part) for part in details["loc"])
            raise ArtifactInvalid(
                f"{path}: {name} {details['msg'].lower()}", remedy="restore the file"
            ) from error


def text_digest(folder: Path) -> str:
    """Returns the SHA-256 that identifies the text part in `folder`.

    It covers settings and tokenizer as canonical JSON, and the tower: name, dtype, shape and bytes
    of every tensor, or, without weights, the bytes of the graph. Raises ArtifactInvalid if a file
    is missing or damaged.
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
    """Returns the digest of both towers' weights from the digest of each tower.

    `PreprocessSpec.fingerprint` makes the model's fingerprint from it.
    """
    return hashlib.sha256(f"{images}{text}".encode()).hexdigest()
