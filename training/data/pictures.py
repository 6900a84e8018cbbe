"""Encoded images to pictures: complete, upright, no larger than the smallest crop needs."""

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
from mlcd.images.faults import is_fault
from mlcd.images.source import Source
from mlcd.images.transform import DecodeMode
from mlcd.training.data.augment_config import AugmentConfig

# The smallest crop's side over the model's input side: shrinking twice then loses less than 5 % of
# the sharpness.
_OVERSIZE: Final = 1.75


@dataclass(frozen=True)
class Sample:
    """A sample to be decoded, and to be cropped by its `position` in the stream.

    sha256: the digest that the image must have; None if it was checked before.
    """

    part: int
    row: int
    entry: Entry
    sha256: bytes | None
    position: int


@dataclass(frozen=True)
class Picture:
    """A decoded picture.

    pixels: uint8 [h, w, 3], of a picture whose full size is `width` x `height`. changed: it differs
    from the one that was labeled.
    """

    pixels: NDArray[np.uint8]
    width: int
    height: int
    changed: bool = False


class Pictures(Protocol):
    """Reads whole pictures; safe to call from several threads."""

    def read(self, sample: Sample) -> Picture:
        """Returns the picture of a sample. Raises ImageRejected."""


def picture_side(image_size: int, config: AugmentConfig) -> int:
    """Returns the side of the square that has as many pixels as the largest kept picture."""
    return max(
        math.ceil(_OVERSIZE * config.size_of(view, image_size) / math.sqrt(config.area_of(view)[0]))
        for view in range(config.num_views)
    )


def open_picture(data: bytes, side: int, mode: DecodeMode) -> Picture:
    """Decodes the picture in `data` in its own proportions.

    It is shrunk if it has more pixels than `side` squared. Raises ImageRejected.
    """
    if mode == "fast":
        scaled = decode_scaled(data, shortest=side)
    else:
        image = decode(data)
        scaled = Scaled(image, (0, 0, *image.size), image.size)
    width, height = scaled.full_size
    shrink = min(1.0, side / math.sqrt(width * height))
    size = (math.ceil(width * shrink), math.ceil(height * shrink))
    shrunk = scaled.image.resize(size, Image.Resampling.BICUBIC, box=scaled.region)
    return Picture(np.asarray(shrunk, dtype=np.uint8), width, height)


class DecodedPictures:
    """Reads and decodes at each call."""

    def __init__(self, sources: Sequence[Source], side: int, mode: DecodeMode) -> None:
        self._sources, self._side, self._mode = sources, side, mode

    def read(self, sample: Sample) -> Picture:
        data = self._sources[sample.part].read(sample.entry)
        picture = open_picture(data, self._side, self._mode)
        if sample.sha256 is not None and hashlib.sha256(data).digest() != sample.sha256:
            return Picture(picture.pixels, picture.width, picture.height, changed=True)
        return picture


class HeldPictures:
    """Decodes each sample at its first request, and keeps the picture or the reason of its
    rejection.
    """

    def __init__(self, pictures: Pictures) -> None:
        self._pictures = pictures
        # Two threads may meet the same sample at once; both keep the same picture.
        self._held: dict[tuple[int, int], Picture | ImageRejected] = {}

    def read(self, sample: Sample) -> Picture:
        position = sample.part, sample.row
        picture = self._held.get(position)
        if picture is None:
            try:
                picture = self._pictures.read(sample)
            except ImageRejected as rejection:
                if is_fault(rejection.__cause__):  # the disk may answer the next time
                    raise
                picture = rejection
            self._held[position] = picture
        if isinstance(picture, ImageRejected):
            raise picture.with_traceback(None)
        return picture
