"""Random resized crop and horizontal flip, drawn from (seed, position in the stream, view)."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.randomness import Stream, uniform
from mlcd.training.data.augment_config import AugmentConfig

_ATTEMPTS: Final = 10  # as in torchvision
_DRAWS: Final = 2 * _ATTEMPTS + 3  # area and aspect of each attempt; then left, top, mirror


@dataclass(frozen=True)
class Augmentation:
    """The settings that crop each picture to square views; the global views have side `image_size`.

    The crops are a function of seed, position and view.
    """

    image_size: int
    config: AugmentConfig
    seed: int


@dataclass(frozen=True)
class Boxes:
    """Crop boxes of n pictures: float64 [n] each, in pixels, not rounded; mirrored: bool [n]."""

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

    The area is uniform in [min_area, 1], or in the range of a local view, and the aspect ratio
    log-uniform in [1/max_aspect, max_aspect]. Both are drawn up to ten times until the box fits; if
    no box fits, the box is the largest centered one whose aspect is within the bound. The offset is
    uniform. A box depends only on seed, view, and its picture's size and position. Unlike
    torchvision's, it is not rounded to whole pixels, which would be coarse in a small picture.
    """
    counters = np.arange(view * _DRAWS, (view + 1) * _DRAWS)
    draws = uniform(seed, Stream.CROPS, positions[:, None], counters)
    area, aspect = draws[:, :_ATTEMPTS], draws[:, _ATTEMPTS : 2 * _ATTEMPTS]
    left, top, mirror = draws[:, 2 * _ATTEMPTS :].T
    low, high = config.area_of(view)
    area = (low + (high - low) * area) * (widths * heights)[:, None]
    ratio = config.max_aspect ** (2.0 * aspect - 1.0)
    sides = np.sqrt([area * ratio, area / ratio])
    fits = (sides[0] <= widths[:, None]) & (sides[1] <= heights[:, None])
    has_fit = fits.any(axis=1)
    width, height = np.where(
        has_fit,
        sides[:, np.arange(len(positions)), fits.argmax(axis=1)],
        [
            np.minimum(widths, heights * config.max_aspect),
            np.minimum(heights, widths * config.max_aspect),
        ],
    )
    return Boxes(
        left=(widths - width) * np.where(has_fit, left, 0.5),
        top=(heights - height) * np.where(has_fit, top, 0.5),
        width=width,
        height=height,
        mirrored=mirror < config.flip,
    )
