"""Decodes images to whole, upright pictures, shrunk to the size that the smallest crop needs."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mlcd.errors import ImageRejected
from mlcd.images.decode import OpenedImage, Scaled, decode, decode_scaled
from mlcd.images.entries import Entry
from mlcd.images.faults import is_fault
from mlcd.images.source import Source
from mlcd.images.transform import DecodeMode
from mlcd.training.data.augment_config import AugmentConfig

# Ratio of the smallest crop's side to the model's input side. At this ratio, resizing twice (the
# picture, then the crop) loses less than 5 % of the sharpness.
_OVERSIZE: Final = 1.75


@dataclass(frozen=True)
class Sample:
    """A sample to decode and crop.

    position: in the stream; decides the crops. sha256: digest of the labeled image; None skips the
    comparison.
    """

    part: int
    row: int
    entry: Entry
    sha256: bytes | None
    position: int


@dataclass(frozen=True)
class Picture:
    """A decoded picture.

    pixels: uint8 [h, w, 3], maybe shrunk. width, height: full size in pixels. changed: the image
    differs from the labeled image.
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
    """Returns the `side` such that pictures are shrunk to at most about side² pixels."""
    return max(
        math.ceil(_OVERSIZE * config.size_of(view, image_size) / math.sqrt(config.area_of(view)[0]))
        for view in range(config.num_views)
    )


def shrunk_size(width: int, height: int, side: int) -> tuple[int, int]:
    """Returns the width and height of a picture that is shrunk to at most about side² pixels."""
    shrink = min(1.0, side / math.sqrt(width * height))
    return math.ceil(width * shrink), math.ceil(height * shrink)


def open_picture(data: bytes | OpenedImage, side: int, mode: DecodeMode) -> Picture:
    """Decodes a picture, keeping its proportions, and shrinks it to at most about side² pixels.

    Raises ImageRejected.
    """
    if mode == "fast":
        scaled = decode_scaled(data, shortest=side)
    else:
        image = decode(data)
        scaled = Scaled(image, (0, 0, *image.size), image.size)
    width, height = scaled.full_size
    size = shrunk_size(width, height, side)
    shrunk = scaled.image.resize(size, Image.Resampling.BICUBIC, box=scaled.region)
    return Picture(np.asarray(shrunk, dtype=np.uint8), width, height)


class DecodedPictures:
    """Reads and decodes the image at each call."""

    def __init__(self, sources: Sequence[Source], side: int, mode: DecodeMode) -> None:
        self._sources, self._side, self._mode = sources, side, mode

    def read(self, sample: Sample) -> Picture:
        data = self._sources[sample.part].read(sample.entry)
        picture = open_picture(data, self._side, self._mode)
        if sample.sha256 is not None and hashlib.sha256(data).digest() != sample.sha256:
            return Picture(picture.pixels, picture.width, picture.height, changed=True)
        return picture


class CachedPictures:
    """Decodes each sample at its first request, and caches the picture or the rejection."""

    def __init__(self, pictures: Pictures) -> None:
        self._pictures = pictures
        # Two threads may decode the same sample at once; both cache the same picture.
        self._cached: dict[tuple[int, int], Picture | ImageRejected] = {}

    def read(self, sample: Sample) -> Picture:
        sample_id = sample.part, sample.row
        picture = self._cached.get(sample_id)
        if picture is None:
            try:
                picture = self._pictures.read(sample)
            except ImageRejected as rejection:
                if is_fault(rejection.__cause__):  # a read error, which may be temporary
                    raise
                picture = rejection
            self._cached[sample_id] = picture
        if isinstance(picture, ImageRejected):
            raise picture.with_traceback(None)
        return picture
