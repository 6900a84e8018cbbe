"""Random resized crop and horizontal flip, drawn from (seed, position in the stream)."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.randomness import Stream, uniform
from training.config import AugmentConfig

_ATTEMPTS: Final = 10  # torchvision's
_DRAWS: Final = 2 * _ATTEMPTS + 3  # area and aspect of each attempt; left, top, mirror


@dataclass(frozen=True)
class Augmentation:
    """The way from each picture to a square of `image_size`. Another seed gives another view of the same position."""

    image_size: int
    config: AugmentConfig
    seed: int


@dataclass(frozen=True)
class Boxes:
    """The boxes of n pictures, float64 [n] each, in their pixels, not whole ones; mirrored: bool [n]."""

    left: NDArray[np.float64]
    top: NDArray[np.float64]
    width: NDArray[np.float64]
    height: NDArray[np.float64]
    mirrored: NDArray[np.bool_]


def crop_boxes(
    widths: NDArray[np.int64],
    heights: NDArray[np.int64],
    positions: NDArray[np.int64],
    config: AugmentConfig,
    seed: int,
) -> Boxes:
    """A box in each picture [n], distributed as those of torchvision's RandomResizedCrop, but for its whole pixels.

    Area uniform in [min_area, 1] and aspect ratio log-uniform in [1/max_aspect, max_aspect], drawn anew up to ten times
    until the box fits; then the largest box in the middle whose aspect is within the bound. Place uniform. A box
    depends on its own picture's size and position only. Whole pixels would be a coarse choice where a picture has few.
    """
    numbers = uniform(seed, Stream.CROPS, positions[:, None], np.arange(_DRAWS))
    area, aspect = numbers[:, :_ATTEMPTS], numbers[:, _ATTEMPTS : 2 * _ATTEMPTS]
    left, top, mirror = numbers[:, 2 * _ATTEMPTS :].T
    area = (config.min_area + (1.0 - config.min_area) * area) * (widths * heights)[:, None]
    ratio = config.max_aspect ** (2.0 * aspect - 1.0)
    tried = np.sqrt([area * ratio, area / ratio])
    fits = (tried[0] <= widths[:, None]) & (tried[1] <= heights[:, None])
    found = fits.any(axis=1)
    width, height = np.where(
        found,
        tried[:, np.arange(len(positions)), fits.argmax(axis=1)],
        [
            np.minimum(widths, heights * config.max_aspect),
            np.minimum(heights, widths * config.max_aspect),
        ],
    )
    return Boxes(
        left=(widths - width) * np.where(found, left, 0.5),
        top=(heights - height) * np.where(found, top, 0.5),
        width=width,
        height=height,
        mirrored=mirror < config.flip,
    )
