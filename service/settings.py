"""Settings of the service: the one place that reads the environment."""

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from mlcd.encoders.base import EngineName
from mlcd.errors import ConfigInvalid
from mlcd.images.decode import ExifPolicy
from mlcd.images.transform import DecodeMode

_PREFIX = "MLCD_"


class Limits(BaseModel, frozen=True, extra="forbid"):
    """What one request, and the server as a whole, may hold. Shown in /v1/info."""

    max_body_bytes: Annotated[int, Field(gt=0)] = 64 * 2**20
    """Bytes of one request's body, counted while it streams in."""
    max_images: Annotated[int, Field(gt=0)] = 64
    """Images (or embeddings) in one request."""
    max_pixels: Annotated[int, Field(gt=0, le=178_956_970)] = 89_478_485
    """Pixels of one image, compared with its header before it is decoded (Pillow itself refuses twice the default)."""
    max_top: Annotated[int, Field(gt=0)] = 1000
    """Labels or matches per image."""
    max_queued_images: Annotated[int, Field(gt=0)] = 512
    """Images admitted at one time; beyond it requests are refused with 429."""
    max_queued_pixels: Annotated[int, Field(gt=0)] = 2_000_000_000
    """Pixels of the images admitted at one time, by their headers: what decoding them costs (10 ms a million)."""
    max_queued_bytes: Annotated[int, Field(gt=0)] = 256 * 2**20
    """Bytes of request bodies held at one time; beyond it requests are refused before their bodies are read."""
    max_connections: Annotated[int, Field(gt=0)] = 1000
    """Connections at one time; for one more, the one that has waited longest for its next request is closed."""
    deadline_s: Annotated[float, Field(gt=0)] = 30.0
    """A request that is not answered by then gets 504, counted from its first byte."""

    @model_validator(mode="after")
    def _one_request_fits(self) -> Self:
        for whole, part in (("max_queued_bytes", "max_body_bytes"), ("max_queued_pixels", "max_pixels")):
            if getattr(self, whole) < getattr(self, part):
                raise ValueError(f"{whole} must not be less than {part}")
        if self.max_queued_images < self.max_images:
            raise ValueError("max_queued_images must not be less than max_images")
        return self


class Settings(BaseSettings):
    """Environment variables MLCD_<NAME>, nested by two underscores: MLCD_LIMITS__MAX_IMAGES."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True)

    model: str
    """A directory made by `mlcd export`, other weights as it takes them, an .onnx file with its JSON, hog or pixels."""
    centers: str | None = None
    """Centers to label with; default: those shipped in the model's directory."""
    engine: EngineName | Literal["fake"] = "auto"
    """fake: of fixed latency, for load tests; only with a model fake:…, and never the other way round."""
    precision: Literal["fp32", "bf16"] = "fp32"
    exif: ExifPolicy | None = None
    """What orientation tags do, other than the model's preprocessing says; another fingerprint."""
    decode: DecodeMode | None = None
    """exact or fast (JPEG at a fraction of its size), other than the model's preprocessing says; as exif."""
    state_dir: str | None = None
    """Holds collections/NAME, each made by `mlcd index`."""
    approximate: bool = False
    """Make the approximate labels of /v1/labels?mode=approximate ready at start, audited on the collections."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    max_batch: Annotated[int, Field(ge=1)] = 32
    """Images that the engine is given at once."""
    engine_threads: Annotated[int, Field(ge=0)] = 0
    """Threads of an engine on the CPU; 0 takes one per core that the process may use."""
    decode_threads: Annotated[int, Field(ge=0)] = 0
    """Threads that decode images; 0 takes one per core."""
    batch_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """A batch that takes longer, and ten times as long as the largest at start, hangs: the engine is started again."""
    drain_s: Annotated[float, Field(ge=0)] = 1.0
    """After SIGTERM the server is not ready but goes on serving for so long, until the balancer has noticed."""
    grace_s: Annotated[float, Field(ge=0)] = 8.0
    """Then requests in flight have so long to finish."""
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _fake_is_meant(self) -> Self:
        if (self.engine == "fake") != self.model.startswith("fake:"):
            raise ValueError("engine fake and a model fake:… are for load tests, and go together only")
        return self


def read_settings(overrides: Mapping[str, Any]) -> Settings:
    """Settings from the environment, with command-line `overrides` (None: not given) on top.

    Raises ConfigInvalid for an unknown MLCD_ name, suggesting the nearest known one, and for bad values.
    """
    known = setting_names()
    for name in os.environ:  # noqa: TID251 - this is the one place
        if name.startswith(_PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise ConfigInvalid(f"unknown setting {name}", remedy=remedy)
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = _PREFIX + ("__".join(str(part).upper() for part in first["loc"]) or "ENGINE")
        if first["type"] == "missing":
            raise ConfigInvalid(f"{name} is not set", remedy="give --model or set it") from error
        raise ConfigInvalid(f"{name}: {first['msg'].removeprefix('Value error, ').lower()}") from error


def setting_names() -> list[str]:
    names = []
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += [f"{_PREFIX}{name}__{nested}".upper() for nested in field.annotation.model_fields]
        else:
            names.append(f"{_PREFIX}{name}".upper())
    return names
