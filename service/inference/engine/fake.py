"""Fake encoders with a fixed latency, for load tests of the queues before an engine.

They need both the engine `fake` and a model `fake:…`, so that no single wrong setting opens them.
Every response and /v1/info contain their name and engine. With the option text=true the model has a
text tower, which knows the names of some colors.
"""

import hashlib
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from mlcd.encoders.text_encoder import Calibration
from mlcd.errors import ConfigInvalid, NoTextTower
from mlcd.images.transform import PreprocessSpec
from mlcd.models.tokenizer import Tokenizer
from mlcd.types import Embeddings, ImageBatch, TokenBatch, unit_rows

PREFIX: Final = "fake:"
_WHITE: Final = 250
_CONTEXT_LENGTH: Final = 32  # tokens; a token is a byte or the name of a color
_PADDING: Final = "<pad>"
_COLORS: Final = {
    "black": (0, 0, 0),
    "blue": (0, 0, 255),
    "gray": (128, 128, 128),
    "green": (0, 255, 0),
    "red": (255, 0, 0),
    "white": (255, 255, 255),
    "yellow": (255, 255, 0),
}
_SCALE: Final = 100.0  # the calibration's factor of cosines, as learned by CLIP's models


class _Behavior(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    latency_ms: float = Field(default=20.0, ge=0)  # per batch of any size
    crop: int = Field(default=32, ge=1)
    dimension: int = Field(default=8, ge=3)
    sick_s: float = Field(default=0.0, ge=0)  # seconds of failing inferences after a white image
    text: bool = False
    text_latency_ms: float | None = Field(default=None, ge=0)  # None: same as latency_ms
    bias: float | None = None  # the calibration's bias, as in SigLIP


class FakeEncoder:
    """An `Encoder` whose embeddings start with the image's mean color."""

    engine, precision = "fake", "fp32"

    def __init__(self, spec: str) -> None:
        """spec: `fake:` and name=value pairs, such as fake:latency_ms=50,dimension=8."""
        self._behavior = _parse(spec)
        self.name = spec
        self.dimension = self._behavior.dimension
        self.fingerprint = hashlib.sha256(spec.encode()).hexdigest()
        self.preprocess = PreprocessSpec(self._behavior.crop, self._behavior.crop)
        self._sick_until = 0.0

    def encode(self, images: ImageBatch) -> Embeddings:
        time.sleep(self._behavior.latency_ms / 1000)
        colors = images.mean(axis=(2, 3), dtype=np.float32)
        if (colors.min(axis=1) > _WHITE).any():
            self._sick_until = time.monotonic() + self._behavior.sick_s
        if time.monotonic() < self._sick_until:
            raise RuntimeError("the fake engine fails after a white image")
        return _rows(colors, self.dimension)

    def close(self) -> None: ...


class FakeTextEncoder:
    """A `TextEncoder` that embeds a text like an image of the colors that it names.

    A text without the name of a color is embedded like a color from a hash of the text.
    """

    engine, precision = "fake", "fp32"

    def __init__(self, spec: str) -> None:
        """spec: see `FakeEncoder`. Raises NoTextTower without the option text=true."""
        images = FakeEncoder(spec)
        tokenizer = fake_tokenizer(spec)
        if tokenizer is None:
            raise NoTextTower(spec)
        behavior = _parse(spec)
        latency_ms = behavior.text_latency_ms
        self.name, self.fingerprint, self.dimension = spec, images.fingerprint, images.dimension
        self.tokenizer = tokenizer
        self.calibration = Calibration(_SCALE, behavior.bias)
        self._latency_s = (behavior.latency_ms if latency_ms is None else latency_ms) / 1000

    def encode(self, ids: TokenBatch) -> Embeddings:
        time.sleep(self._latency_s)
        return _rows(np.stack([_find_color(row) for row in ids]), self.dimension)

    def close(self) -> None: ...


def fake_tokenizer(spec: str) -> Tokenizer | None:
    """Returns the tokenizer of a fake model; None without a text tower."""
    if not _parse(spec).text:
        return None
    letters = {letter: token_id for token_id, letter in enumerate(sorted(ByteLevel.alphabet()), 1)}
    backend = Backend(BPE(vocab={_PADDING: 0, **letters}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.add_tokens([AddedToken(name, single_word=True) for name in _COLORS])
    backend.enable_padding(length=_CONTEXT_LENGTH, pad_id=0, pad_token=_PADDING)
    backend.enable_truncation(_CONTEXT_LENGTH)
    return Tokenizer(backend, {}, _CONTEXT_LENGTH)


def _find_color(ids: NDArray[np.int64]) -> NDArray[np.float32]:
    first_color_id = 1 + len(ByteLevel.alphabet())
    colors = list(_COLORS.values())
    named_colors = [
        colors[token_id - first_color_id] for token_id in ids if token_id >= first_color_id
    ]
    hashed_color = [*hashlib.sha256(ids.tobytes()).digest()[:3]]
    color: NDArray[np.float32] = np.asarray(named_colors or [hashed_color], np.float32).mean(axis=0)
    return color


def _rows(colors: NDArray[np.float32], dimension: int) -> Embeddings:
    rows = np.ones((len(colors), dimension), np.float32)
    rows[:, :3] += colors
    return unit_rows(rows)


def _parse(spec: str) -> _Behavior:
    pairs: dict[str, Any] = dict(
        pair.partition("=")[::2] for pair in spec.removeprefix(PREFIX).split(",") if pair
    )
    try:
        return _Behavior.model_validate(pairs)
    except ValidationError as error:
        name = ".".join(str(part) for part in error.errors()[0]["loc"])
        options = ", ".join(_Behavior.model_fields)
        raise ConfigInvalid(
            f"{spec}: the option {name} is unknown or has a wrong value", remedy=f"known: {options}"
        ) from error
