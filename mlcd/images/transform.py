"""RGB picture to the uint8 square that an encoder takes: one implementation for training, export and serving."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mlcd.errors import ConfigInvalid
from mlcd.images.decode import DEFAULT_LIMITS, DecodeLimits, ExifPolicy, decode

# openai/CLIP's statistics of its training images, used by every MLCD checkpoint (method.md 9.1).
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class PreprocessSpec:
    """How pixels are prepared; part of a model's fingerprint.

    The shortest side becomes `resize_shortest` pixels (PIL bicubic with antialias), then the central
    `crop` x `crop` square is taken. mean and std, of pixels divided by 255, are applied inside the model.
    """

    resize_shortest: int
    crop: int
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    interpolation: Literal["bicubic"] = "bicubic"
    exif: ExifPolicy = "apply"
    version: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.crop <= self.resize_shortest:
            raise ConfigInvalid(f"the crop of {self.crop} must be in 1..{self.resize_shortest} (resize_shortest)")
        if self.interpolation != "bicubic" or self.exif not in ("apply", "ignore"):
            raise ConfigInvalid("preprocessing knows interpolation bicubic, and exif apply or ignore")
        if min(self.std) <= 0:
            raise ConfigInvalid("std must be positive")

    def to_json(self) -> str:
        """Canonical: equal specs give equal bytes."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        known = {"resize_shortest", "crop", "mean", "std", "interpolation", "exif", "version"}
        unknown = set(fields) - known
        if unknown:
            raise ConfigInvalid(f"preprocessing has no field {min(unknown)}", remedy=f"known: {sorted(known)}")
        try:
            triples: dict[str, Any] = {name: tuple(fields[name]) for name in ("mean", "std") if name in fields}
            return cls(**{**fields, **triples})
        except TypeError as error:
            raise ConfigInvalid("preprocessing needs resize_shortest, crop, mean and std") from error

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise ConfigInvalid(f"{path} cannot be read as preprocessing") from error

    def apply(self, image: Image.Image) -> NDArray[np.uint8]:
        """RGB picture to uint8 [3, crop, crop], equal to HF's CLIP image processor before normalization."""
        width, height = image.size
        scale_to = self.resize_shortest
        if width <= height:
            size = (scale_to, max(scale_to, int(scale_to * height / width)))
        else:
            size = (max(scale_to, int(scale_to * width / height)), scale_to)
        left, top = (size[0] - self.crop) // 2, (size[1] - self.crop) // 2
        if max(size) > _MAX_ASPECT * scale_to:  # a 1 x 65535 strip: resize only what the crop will keep
            return _channels_first(_resized_strip(image, size, (left, top, left + self.crop, top + self.crop)))
        resized = image.resize(size, Image.Resampling.BICUBIC)
        return _channels_first(resized.crop((left, top, left + self.crop, top + self.crop)))

    def prepare(self, data: bytes, limits: DecodeLimits = DEFAULT_LIMITS) -> NDArray[np.uint8]:
        """Encoded image bytes to uint8 [3, crop, crop]; raises ImageRejected."""
        return self.apply(decode(data, exif=self.exif, limits=limits))


_MAX_ASPECT: Final = 64


def _resized_strip(image: Image.Image, size: tuple[int, int], box: tuple[int, int, int, int]) -> Image.Image:
    scale_x, scale_y = image.size[0] / size[0], image.size[1] / size[1]
    source = (box[0] * scale_x, box[1] * scale_y, box[2] * scale_x, box[3] * scale_y)
    return image.resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.BICUBIC, box=source)


def _channels_first(image: Image.Image) -> NDArray[np.uint8]:
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))
