"""Paired differences over seeds, and how many digits they support."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from scipy.stats import t

_MIN_PAIRS: Final = 4

Values = Mapping[int, float]
"""By seed."""


@dataclass(frozen=True)
class Interval:
    """mean and the half width of its 95 % t-interval over n pairs; NaN below two."""

    mean: float
    half_width: float
    n: int

    @property
    def is_clear(self) -> bool:
        """Whether zero is outside; never of fewer than four pairs, where equal differences are chance."""
        return self.n >= _MIN_PAIRS and abs(self.mean) > self.half_width


def paired_difference(first: Values, second: Values) -> Interval:
    """Of first minus second over the seeds that both have: same seed, same first weights, order, augmentation."""
    seeds = sorted(first.keys() & second.keys())
    return interval([first[seed] - second[seed] for seed in seeds])


def interval(values: list[float]) -> Interval:
    """Of the mean of independent values."""
    n = len(values)
    if n < 2:
        return Interval(values[0] if values else math.nan, math.nan, n)
    half_width = float(t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return Interval(statistics.mean(values), half_width, n)


def in_points(found: Interval) -> str:
    """Percentage points, with a decimal only where the interval supports one."""
    if found.n == 0:
        return "not run"
    half_width = 100 * found.half_width
    digits = 1 if half_width < 2 else 0
    mean = round(100 * found.mean, digits) + 0.0  # no minus before a zero
    if math.isnan(half_width):
        return f"{mean:+.0f} (n = 1)"
    text = f"{mean:+.{digits}f} ± {half_width:.{digits}f}"
    return f"**{text}**" if found.is_clear else text
