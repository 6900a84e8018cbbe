"""Paired differences over seeds, and their text."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from scipy.stats import t

# Fewer pairs have no visible interval: two that happen to be alike would seem the surest of all.
MIN_PAIRS: Final = 4

# Values by seed.
Values = Mapping[int, float]


@dataclass(frozen=True)
class Interval:
    """An interval: mean and half width of its 95 % t-interval over n pairs; NaN below two."""

    mean: float
    half_width: float
    n: int

    @property
    def is_clear(self) -> bool:
        """Tells if zero is outside; false with fewer than MIN_PAIRS."""
        return self.n >= MIN_PAIRS and abs(self.mean) > self.half_width


def paired_difference(first: Values, second: Values) -> Interval:
    """Returns the interval of first minus second over the seeds that both have.

    A pair has the same seed, and so the same first weights, order and augmentation.
    """
    seeds = sorted(first.keys() & second.keys())
    return interval([first[seed] - second[seed] for seed in seeds])


def interval(values: list[float]) -> Interval:
    """Returns the interval of the mean of independent values."""
    n = len(values)
    if n < 2:
        return Interval(values[0] if values else math.nan, math.nan, n)
    half_width = float(t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return Interval(statistics.mean(values), half_width, n)


def in_points(found: Interval) -> str:
    """Formats an interval in percentage points."""
    if found.n == 0:
        return "not run"
    mean = round(100 * found.mean, 1) + 0.0  # adding 0.0 removes the minus of a zero
    if found.n < MIN_PAIRS:
        return f"{mean:+.1f} (n = {found.n})"
    text = f"{mean:+.1f} ± {100 * found.half_width:.1f}"
    return f"**{text}**" if found.is_clear else text
