"""Random resized crop and horizontal flip, drawn from (seed, position in the stream, view)."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.randomness import Stream, uniform
from mlcd.training.data.augment_config import AugmentConfig

_ATTEMPTS: Final = 10  # the number of torchvision
_DRAWS: Final = 2 * _ATTEMPTS + 3  # area and aspect of each attempt; then left, top, mirror


@dataclass(frozen=True)
class Augmentation:
    """The settings that turn each picture into squares, the global ones of `image_size`.

    Another seed gives other views of the same position.
    """

    image_size: int
    config: AugmentConfig
    seed: int


@dataclass(frozen=True)
class Boxes:
    """The boxes of n pictures in pixels, float64 [n] each, not rounded; mirrored: bool [n]."""

    left: NDArray[np.float64]
    top: NDArray[np.float64]
    width: NDArray[np.float64]
    height: NDArray[np.float64]
    mirrored: NDArray[np.bool_]

    def corners(self, index: int) -> tuple[float, float, float, float]:
        """Returns left, top, right and bottom of a picture's box."""
        left, top = float(self.left[index]), float(self.top[index])
        return left, top, left + float(self.width[index]), top + float(self.height[index])


def crop_boxes(
    widths: NDArray[np.int64],
    heights: NDArray[np.int64],
    positions: NDArray[np.int64],
    config: AugmentConfig,
    seed: int,
    view: int = 0,
) -> Boxes:
    """Draws a box in each picture [n], distributed like torchvision's RandomResizedCrop.

    Area is uniform in [min_area, 1], or in the range of a local view, and aspect ratio log-uniform
    in [1/max_aspect, max_aspect]. Both are drawn up to ten times until the box fits; if none does,
    the box is the largest in the middle whose aspect is within the bound. The place is uniform. A
    box depends on its own picture's size and position only. Unlike torchvision's, it is not rounded
    to whole pixels, which would be a coarse choice in a small picture.
    """
    draws = np.arange(view * _DRAWS, (view + 1) * _DRAWS)
    numbers = uniform(seed, Stream.CROPS, positions[:, None], draws)
    area, aspect = numbers[:, :_ATTEMPTS], numbers[:, _ATTEMPTS : 2 * _ATTEMPTS]
    left, top, mirror = numbers[:, 2 * _ATTEMPTS :].T
    low, high = config.area_of(view)
    area = (low + (high - low) * area) * (widths * heights)[:, None]
    ratio = config.max_aspect ** (2.0 * aspect - 1.0)
    attempts = np.sqrt([area * ratio, area / ratio])
    fits = (attempts[0] <= widths[:, None]) & (attempts[1] <= heights[:, None])
    is_drawn = fits.any(axis=1)
    width, height = np.where(
        is_drawn,
        attempts[:, np.arange(len(positions)), fits.argmax(axis=1)],
        [
            np.minimum(widths, heights * config.max_aspect),
            np.minimum(heights, widths * config.max_aspect),
        ],
    )
    return Boxes(
        left=(widths - width) * np.where(is_drawn, left, 0.5),
        top=(heights - height) * np.where(is_drawn, top, 0.5),
        width=width,
        height=height,
        mirrored=mirror < config.flip,
    )
