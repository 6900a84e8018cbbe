"""Encoded images to pictures: the whole of it, upright, no larger than the smallest crop needs."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mlcd.errors import ImageRejected
from mlcd.images.decode import Scaled, decode, decode_scaled
from mlcd.images.entries import Entry
from mlcd.images.source import Source
from mlcd.images.transform import DecodeMode
from training.config import AugmentConfig

# Of the smallest crop's side over the model's input: what is lost by shrinking twice is below 5 % of the sharpness.
_OVERSIZE: Final = 1.75


@dataclass(frozen=True)
class Sample:
    """A sample to be decoded, and to be cropped by its `position` in the stream.

    sha256: that the image must have, None where it was checked before.
    """

    part: int
    row: int
    entry: Entry
    sha256: bytes | None
    position: int


@dataclass(frozen=True)
class Picture:
    """pixels: uint8 [h, w, 3], of a picture that is `width` x `height` in full.

    changed: it is not the one that was labeled.
    """

    pixels: NDArray[np.uint8]
    width: int
    height: int
    changed: bool = False


class Pictures(Protocol):
    """Gives whole pictures; safe to call from several threads."""

    def read(self, sample: Sample) -> Picture:
        """Raises ImageRejected."""


def picture_side(image_size: int, config: AugmentConfig) -> int:
    """The side of the square that has as many pixels as the largest picture that is kept."""
    return math.ceil(_OVERSIZE * image_size / math.sqrt(config.min_area))


def open_picture(data: bytes, side: int, mode: DecodeMode) -> Picture:
    """The picture in `data`, in its own proportions, shrunk where it has more pixels than `side` squared.

    Raises ImageRejected.
    """
    if mode == "fast":
        scaled = decode_scaled(data, shortest=side)
    else:
        image = decode(data)
        scaled = Scaled(image, (0, 0, *image.size), image.size)
    width, height = scaled.full_size
    shrink = min(1.0, side / math.sqrt(width * height))
    size = (math.ceil(width * shrink), math.ceil(height * shrink))
    kept = scaled.image.resize(size, Image.Resampling.BICUBIC, box=scaled.region)
    return Picture(np.asarray(kept, dtype=np.uint8), width, height)


class DecodedPictures:
    """Reads and decodes every time."""

    def __init__(self, sources: Sequence[Source], side: int, mode: DecodeMode) -> None:
        self._sources, self._side, self._mode = sources, side, mode

    def read(self, sample: Sample) -> Picture:
        data = self._sources[sample.part].read(sample.entry)
        picture = open_picture(data, self._side, self._mode)
        if sample.sha256 is not None and hashlib.sha256(data).digest() != sample.sha256:
            return Picture(picture.pixels, picture.width, picture.height, changed=True)
        return picture


class HeldPictures:
    """Decodes each sample the first time that it is asked for, and keeps it, or the reason why it has no pixels."""

    def __init__(self, pictures: Pictures) -> None:
        self._pictures = pictures
        # Two threads may meet the same sample at once; both keep the same.
        self._held: dict[tuple[int, int], Picture | ImageRejected] = {}

    def read(self, sample: Sample) -> Picture:
        place = sample.part, sample.row
        held = self._held.get(place)
        if held is None:
            try:
                held = self._pictures.read(sample)
            except ImageRejected as rejection:
                held = rejection
            self._held[place] = held
        if isinstance(held, ImageRejected):
            raise held.with_traceback(None)
        return held
