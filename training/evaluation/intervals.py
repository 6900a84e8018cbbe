"""The uncertainty of a figure that comes from the choice of the tested images."""

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

RESAMPLES: Final = 1000
_LEVEL: Final = 0.95
_SEED: Final = 0

# The lower and the upper end.
Interval: TypeAlias = tuple[float, float]


def bootstrap(measure: Callable[[NDArray[np.int64]], float], num_images: int) -> Interval:
    """Returns the 95 % percentile interval of a measure over images drawn with replacement.

    measure: takes the images of one draw, [num_images]. The draws are always the same, so the
    intervals of two models on the same images rest on the same draws.
    """
    generator = np.random.default_rng(_SEED)
    figures = [measure(generator.integers(0, num_images, num_images)) for _ in range(RESAMPLES)]
    low, high = np.nanquantile(figures, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)
