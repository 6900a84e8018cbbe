"""The issues that the pixels of an image alone show, by the measures of cleanvision 0.3.7.

issue            measured by                                                      found below, or at
dark             the 99th percentile of the pixels' brightness                    0.32
light            1 - the 5th percentile of it                                     0.05
blurry           1 - exp(-s / 100), s: the spread of the edges; see `_sharpness`  0.29
low-information  a tenth of the entropy of the histogram in bits                  0.3
odd-aspect       the shorter side over the longer one                             0.35
odd-size         the root of the area, among those of all images: more than three times their
                 interquartile range beyond the quartiles

A picture whose channels are equal counts as gray, however it is stored.
"""

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageStat

from mlcd.images.decode import decode
from mlcd.types import ISSUES

_LEAST: Final[Mapping[str, float]] = {
    "odd-aspect": 0.35,
    "dark": 0.32,
    "light": 0.05,
    "low-information": 0.3,
    "blurry": 0.29,
}
_OUT_OF_RANGE: Final = 3.0  # interquartile ranges
_PERCENTILES: Final = (5, 99)
_SIDE: Final = 64  # of the picture in which edges are sought
_SPREAD: Final = 0.01
_EVEN: Final = 0.18  # a histogram no more uneven than that tells nothing of blur
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
        "low-information": min(1.0, _plain(image).entropy() / 10),
        "blurry": _sharpness(image),
    }
    return np.array([scores[issue] for issue in ISSUES])


def issues_of(scores: NDArray[np.float64]) -> dict[str, NDArray[np.bool_]]:
    """Returns which of N images have each issue, [N] each. scores: [N, 6]; NaN rows have none."""
    has_issue = {issue: scores[:, ISSUES.index(issue)] < least for issue, least in _LEAST.items()}
    sizes = scores[:, 0]
    if not np.isfinite(sizes).any():
        return has_issue | {"odd-size": np.zeros(len(sizes), np.bool_)}
    first, third = np.nanpercentile(sizes, (25, 75))
    reach = _OUT_OF_RANGE * (third - first)
    return has_issue | {"odd-size": (sizes < first - reach) | (sizes > third + reach)}


def _brightness(image: Image.Image) -> NDArray[np.float64]:
    red, green, blue = np.moveaxis(np.asarray(image).astype(np.float64), 2, 0)
    weighted: NDArray[np.float64] = _RED * red**2 + _GREEN * green**2 + _BLUE * blue**2
    return np.sqrt(weighted) / 255


def _plain(image: Image.Image) -> Image.Image:
    """Returns a gray picture with one channel, as a file of a gray picture has it."""
    red, green, blue = image.split()
    is_gray = red.tobytes() == green.tobytes() == blue.tobytes()
    return red if is_gray else image


def _sharpness(image: Image.Image) -> float:
    """Returns the spread of the edges of a small gray picture, and that of its histogram where it
    is uneven, each as 1 - exp(-spread / 100).
    """
    ratio = max(1.0, max(image.size) / _SIDE)
    size = (max(1, int(image.width // ratio)), max(1, int(image.height // ratio)))
    gray = (image if ratio == 1 else image.resize(size)).convert("L")
    edges = ImageStat.Stat(gray.filter(ImageFilter.FIND_EDGES))
    sharp = 1 - math.exp(-_SPREAD * math.sqrt(edges.var[0]))
    tones = 1 - math.exp(-_SPREAD * float(np.std(gray.histogram())))
    return min(1.0, sharp + (tones if tones > _EVEN else 0.0))
