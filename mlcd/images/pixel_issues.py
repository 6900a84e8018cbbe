"""Finds issues in the pixels of single images, with the measures of cleanvision 0.3.7.

issue            measured by                                                      issue if less than
dark             the 99th percentile of the pixels' brightness                    0.32
light            1 - the 5th percentile of brightness                             0.05
blurry           1 - exp(-s / 100), s: std of the edge image; see `_sharpness`    0.29
low-information  a tenth of the entropy of the histogram in bits                  0.3
odd-aspect       the shorter side over the longer one                             0.35

odd-size compares sqrt(width * height) with all images: it is an issue if more than 3 interquartile
ranges outside their quartiles. An image with three equal channels counts as gray.
"""

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageStat

from mlcd.images.decode import decode
from mlcd.types import ISSUES

_THRESHOLDS: Final[Mapping[str, float]] = {
    "odd-aspect": 0.35,
    "dark": 0.32,
    "light": 0.05,
    "low-information": 0.3,
    "blurry": 0.29,
}
_MAX_DISTANCE: Final = 3.0  # from the quartiles, in interquartile ranges
_PERCENTILES: Final = (5, 99)
_MAX_EDGE_SIDE: Final = 64  # longest side of the image that edges are detected in, pixels
_SPREAD_SCALE: Final = 0.01
_MIN_TONE_SCORE: Final = 0.18  # a lower histogram score says nothing about blur
_RED, _GREEN, _BLUE = 0.241, 0.691, 0.068


def pixel_scores(data: bytes) -> NDArray[np.float64]:
    """Returns the score of an encoded image for each of ISSUES, [6]; the first is its size.

    Raises ImageRejected.
    """
    image = decode(data)
    brightness = _brightness(image)
    low, high = np.percentile(brightness, _PERCENTILES)
    width, height = image.size
    scores = {
        "odd-size": math.sqrt(width) * math.sqrt(height),
        "odd-aspect": min(width, height) / max(width, height),
        "dark": high,
        "light": 1 - low,
        "low-information": min(1.0, _drop_equal_channels(image).entropy() / 10),
        "blurry": _sharpness(image),
    }
    return np.array([scores[issue] for issue in ISSUES])


def issues_of(scores: NDArray[np.float64]) -> dict[str, NDArray[np.bool_]]:
    """Returns a mask [N] for each issue. scores: [N, 6]; a row of NaN is without issues."""
    has_issue = {
        issue: scores[:, ISSUES.index(issue)] < threshold
        for issue, threshold in _THRESHOLDS.items()
    }
    sizes = scores[:, 0]
    if not np.isfinite(sizes).any():
        return has_issue | {"odd-size": np.zeros(len(sizes), np.bool_)}
    first, third = np.nanpercentile(sizes, (25, 75))
    margin = _MAX_DISTANCE * (third - first)
    return has_issue | {"odd-size": (sizes < first - margin) | (sizes > third + margin)}


def _brightness(image: Image.Image) -> NDArray[np.float64]:
    red, green, blue = np.moveaxis(np.asarray(image).astype(np.float64), 2, 0)
    weighted: NDArray[np.float64] = _RED * red**2 + _GREEN * green**2 + _BLUE * blue**2
    return np.sqrt(weighted) / 255


def _drop_equal_channels(image: Image.Image) -> Image.Image:
    """Returns one channel if all three are equal, otherwise the image unchanged."""
    red, green, blue = image.split()
    is_gray = red.tobytes() == green.tobytes() == blue.tobytes()
    return red if is_gray else image


def _sharpness(image: Image.Image) -> float:
    """Returns the edge score plus, above _MIN_TONE_SCORE, the histogram score, at most 1; each is
    1 - exp(-std / 100) of the shrunken gray image.
    """
    ratio = max(1.0, max(image.size) / _MAX_EDGE_SIDE)
    size = (max(1, int(image.width // ratio)), max(1, int(image.height // ratio)))
    gray = (image if ratio == 1 else image.resize(size)).convert("L")
    edges = ImageStat.Stat(gray.filter(ImageFilter.FIND_EDGES))
    sharp = 1 - math.exp(-_SPREAD_SCALE * math.sqrt(edges.var[0]))
    tones = 1 - math.exp(-_SPREAD_SCALE * float(np.std(gray.histogram())))
    return min(1.0, sharp + (tones if tones > _MIN_TONE_SCORE else 0.0))
