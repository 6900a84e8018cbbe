"""Transforms an RGB image to the uint8 square that an encoder takes, for training, export and
service.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mlcd.errors import ConfigInvalid
from mlcd.images.decode import (
    DEFAULT_LIMITS,
    DecodeLimits,
    ExifPolicy,
    OpenedImage,
    Scaled,
    decode,
    decode_scaled,
)
from mlcd.types import Fingerprint

DecodeMode = Literal["exact", "fast"]
Resize = Literal["shortest", "square"]
Interpolation = Literal["bicubic", "bilinear"]

# openai/CLIP's statistics of its training images; every MLCD checkpoint uses them (method.md 9.1).
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class PreprocessSpec:
    """The preprocessing of images, which is part of a model's fingerprint.

    The shortest side is resized to `resize_shortest` pixels (PIL's interpolation with antialias),
    then the central `crop` x `crop` square is cropped. With `resize` square, as in SigLIP, both
    sides are resized to `crop` pixels, without cropping. The model itself applies mean and std, to
    pixels divided by 255. With `decode` fast, a JPEG may be decoded at a smaller scale, at least
    twice `resize_shortest` on its shortest side. The pixels then differ, and so does the
    fingerprint; the same images are accepted.
    """

    resize_shortest: int
    crop: int
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    interpolation: Interpolation = "bicubic"
    exif: ExifPolicy = "apply"
    decode: DecodeMode = "exact"
    version: int = 1
    resize: Resize = "shortest"

    def __post_init__(self) -> None:
        if not 1 <= self.crop <= self.resize_shortest:
            raise ConfigInvalid(
                f"crop must be in 1..{self.resize_shortest} (resize_shortest), got {self.crop}"
            )
        if self.resize not in ("shortest", "square"):
            raise ConfigInvalid(f"resize must be shortest or square, got {self.resize}")
        if self.resize == "square" and self.crop != self.resize_shortest:
            raise ConfigInvalid(
                f"resize square needs crop equal to resize_shortest, got crop {self.crop} and"
                f" resize_shortest {self.resize_shortest}"
            )
        if self.interpolation not in _RESAMPLING or self.exif not in ("apply", "ignore"):
            raise ConfigInvalid(
                "interpolation must be bicubic or bilinear, and exif apply or ignore, got"
                f" {self.interpolation} and {self.exif}"
            )
        if self.decode not in ("exact", "fast"):
            raise ConfigInvalid(f"decode must be exact or fast, got {self.decode}")
        if min(self.std) <= 0:
            raise ConfigInvalid(f"std must be positive, got {self.std}")

    def to_json(self) -> str:
        """Returns canonical JSON: equal specs give equal bytes."""
        fields = asdict(self)
        # fields are left out at their defaults, so that older models keep their fingerprints
        if self.decode == "exact":
            del fields["decode"]
        if self.resize == "shortest":
            del fields["resize"]
        return json.dumps(fields, indent=2, sort_keys=True) + "\n"

    def fingerprint(self, content: str) -> Fingerprint:
        """Returns the fingerprint of a model with this preprocessing; `content` identifies its
        weights.
        """
        return hashlib.sha256(f"{content}\0{self.to_json()}".encode()).hexdigest()

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        field_names = {
            "resize_shortest",
            "crop",
            "mean",
            "std",
            "interpolation",
            "exif",
            "decode",
            "version",
            "resize",
        }
        unknown = set(fields) - field_names
        if unknown:
            raise ConfigInvalid(
                f"the fields of preprocessing are {', '.join(sorted(field_names))}, got"
                f" {min(unknown)}"
            )
        try:
            triples: dict[str, Any] = {
                name: tuple(fields[name]) for name in ("mean", "std") if name in fields
            }
            return cls(**{**fields, **triples})
        except TypeError as error:
            raise ConfigInvalid(
                "preprocessing needs resize_shortest, crop, mean and std"
            ) from error

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise ConfigInvalid(f"{path} cannot be read as preprocessing") from error

    def apply(self, image: Image.Image) -> NDArray[np.uint8]:
        """Transforms an RGB image to uint8 [3, crop, crop], equal to transformers' CLIP or SigLIP
        image processor before normalization.
        """
        return self._square(Scaled(image, (0, 0, *image.size), image.size))

    def prepare(
        self, data: bytes | OpenedImage, limits: DecodeLimits = DEFAULT_LIMITS
    ) -> NDArray[np.uint8]:
        """Transforms encoded image bytes to uint8 [3, crop, crop]; raises ImageRejected.

        Raises ConfigInvalid if `decode` is fast and its decoder is not installed.
        """
        if self.decode == "exact":
            return self.apply(decode(data, exif=self.exif, limits=limits))
        shortest = _FAST_MARGIN * self.resize_shortest
        return self._square(decode_scaled(data, shortest=shortest, exif=self.exif, limits=limits))

    def _square(self, picture: Scaled) -> NDArray[np.uint8]:
        resample = _RESAMPLING[self.interpolation]
        if self.resize == "square":
            side = (self.crop, self.crop)
            return _channels_first(picture.image.resize(side, resample, box=picture.region))
        # computed from the full size, so that a scaled picture gets the same crop
        width, height = picture.full_size
        shortest = self.resize_shortest
        if width <= height:
            size = (shortest, max(shortest, int(shortest * height / width)))
        else:
            size = (max(shortest, int(shortest * width / height)), shortest)
        x, y = (size[0] - self.crop) // 2, (size[1] - self.crop) // 2
        box = (x, y, x + self.crop, y + self.crop)
        # a long strip (as 1 x 65535) would be huge: only the pixels of the crop are computed
        if max(size) > _MAX_ASPECT * shortest:
            return _channels_first(_resize_part(picture, size, box, resample))
        return _channels_first(picture.image.resize(size, resample, box=picture.region).crop(box))


_RESAMPLING: Final = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
}
# A smaller factor lowers the cosine to the exact embedding, a larger one costs time
# (docs/reference/decoding.md).
_FAST_MARGIN: Final = 2
_MAX_ASPECT: Final = 64
# The support of the bicubic filter: source pixels on each side, times the factor of shrinking
# (bilinear: 1).
_SUPPORT: Final = 2


def _resize_part(
    picture: Scaled,
    size: tuple[int, int],
    box: tuple[int, int, int, int],
    resample: Image.Resampling,
) -> Image.Image:
    """Returns the pixels inside `box` of the picture resized to `size`, computed only from the
    source pixels that they depend on.
    """
    image, (x0, y0, x1, y1) = picture.image, picture.region
    scale_x, scale_y = (x1 - x0) / size[0], (y1 - y0) / size[1]
    source = (
        x0 + box[0] * scale_x,
        y0 + box[1] * scale_y,
        x0 + box[2] * scale_x,
        y0 + box[3] * scale_y,
    )
    margin_x, margin_y = (math.ceil(_SUPPORT * max(scale, 1)) + 1 for scale in (scale_x, scale_y))
    # Pillow stores a box in float32, which is too coarse far inside a long strip; cropping first
    # keeps the coordinates small.
    cut = (
        max(0, math.floor(source[0]) - margin_x),
        max(0, math.floor(source[1]) - margin_y),
        min(image.width, math.ceil(source[2]) + margin_x),
        min(image.height, math.ceil(source[3]) + margin_y),
    )
    part = image.crop(cut)
    across = (source[0] - cut[0], source[2] - cut[0])
    down = (source[1] - cut[1], source[3] - cut[1])
    # in the order in which Pillow would filter the whole picture
    if size[1] < image.height > image.width:
        tall = _resize_down(part, down, box[3] - box[1], resample)
        return _resize_across(tall, across, box[2] - box[0], resample)
    wide = _resize_across(part, across, box[2] - box[0], resample)
    return _resize_down(wide, down, box[3] - box[1], resample)


def _resize_across(
    image: Image.Image, span: tuple[float, float], width: int, resample: Image.Resampling
) -> Image.Image:
    return image.resize((width, image.height), resample, box=(span[0], 0, span[1], image.height))


def _resize_down(
    image: Image.Image, span: tuple[float, float], height: int, resample: Image.Resampling
) -> Image.Image:
    return image.resize((image.width, height), resample, box=(0, span[0], image.width, span[1]))


def _channels_first(image: Image.Image) -> NDArray[np.uint8]:
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))
