"""An encoder of fixed latency for load tests of the queue in front of it. It computes nothing.

It is opened only by engine `fake` together with a model `fake:…`: no single mistake in a setting
opens it. Every answer and /v1/info carry its name and engine.
"""

import hashlib
import time
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlcd.errors import ConfigInvalid
from mlcd.images.transform import PreprocessSpec
from mlcd.types import Embeddings, ImageBatch, unit_rows

PREFIX = "fake:"
_WHITE = 250


class _Behavior(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    latency_ms: float = Field(default=20.0, ge=0)  # of a batch, whatever its size
    crop: int = Field(default=32, ge=1)
    dimension: int = Field(default=8, ge=3)
    sick_s: float = Field(default=0.0, ge=0)  # how long inferences fail after a white image


class FakeEncoder:
    """An `Encoder` whose embeddings begin with the image's mean color."""

    engine, precision = "fake", "fp32"

    def __init__(self, spec: str) -> None:
        """Reads `fake:` and name=value pairs, as in fake:latency_ms=50,dimension=8."""
        self._behavior = _read(spec)
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
            raise RuntimeError("the fake engine is told to fail")
        rows = np.ones((len(images), self.dimension), np.float32)
        rows[:, :3] += colors
        return unit_rows(rows)

    def close(self) -> None: ...


def _read(spec: str) -> _Behavior:
    pairs: dict[str, Any] = dict(
        pair.partition("=")[::2] for pair in spec.removeprefix(PREFIX).split(",") if pair
    )
    try:
        return _Behavior.model_validate(pairs)
    except ValidationError as error:
        name = ".".join(str(part) for part in error.errors()[0]["loc"])
        known = ", ".join(_Behavior.model_fields)
        raise ConfigInvalid(
            f"{spec}: {name} is not understood", remedy=f"known: {known}"
        ) from error
