"""Confidence intervals of metrics over the choice of the tested images."""

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

RESAMPLES: Final = 1000
_LEVEL: Final = 0.95
_SEED: Final = 0

# (lower end, upper end)
Interval: TypeAlias = tuple[float, float]


def bootstrap(measure: Callable[[NDArray[np.int64]], float], num_images: int) -> Interval:
    """Returns the 95 % percentile interval of a metric by the bootstrap over images.

    measure: returns the metric of drawn image indices, [num_images]. All calls use the same draws,
    so the intervals of two models on the same images are comparable.
    """
    generator = np.random.default_rng(_SEED)
    metrics = [measure(generator.integers(0, num_images, num_images)) for _ in range(RESAMPLES)]
    low, high = np.nanquantile(metrics, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)
