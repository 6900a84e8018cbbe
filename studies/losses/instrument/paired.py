"""Differences between two arms by the seeds that both have.

It is the model accuracy ~ arm + (1 | seed) with a residual of each pair's own. One residual of all
arms together would say too much of noisy arms and too little of quiet ones: over the seeds of a
teacher, `cd` less MLCD varies two to three times as much as MLC less MLCD.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Final

import numpy as np
from scipy.stats import t, ttest_1samp
from statsmodels.stats.multitest import multipletests

_ROUNDED: Final = 1e-12  # differences that vary by less are one number


@dataclass(frozen=True)
class Difference:
    """A mean difference, the half width of its 95 % interval, and its p-values.

    p: of no difference, two-sided. p_equal: of a difference beyond the margin, the larger of two
    one-sided tests.
    """

    mean: float
    half_width: float
    p: float
    p_equal: float


def paired_difference(
    ours: Mapping[int, float], theirs: Mapping[int, float], *, margin: float
) -> Difference:
    """Returns the first arm less the other, values by seed, over the seeds that both have: t-tests
    of at least two differences.
    """
    apart = np.array([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])
    mean = float(apart.mean())
    if np.ptp(apart) < _ROUNDED and abs(mean) >= _ROUNDED:  # no test knows how far it may vary
        return Difference(mean, math.inf, 1.0, 1.0)
    if np.ptp(apart) < _ROUNDED:  # the same numbers
        return Difference(mean, 0.0, 1.0, 0.0)
    found = ttest_1samp(apart, 0.0)
    low, high = found.confidence_interval()
    above = ttest_1samp(apart, -margin, alternative="greater").pvalue
    below = ttest_1samp(apart, margin, alternative="less").pvalue
    return Difference(mean, float(high - low) / 2, float(found.pvalue), float(max(above, below)))


def seeds_for(difference: Difference, num_seeds: int, half_width: float) -> int:
    """Returns how many seeds would make the interval this narrow, if they vary as those that were
    run; fewer than were run where it is narrower already.

    num_seeds: those of the difference.
    """
    deviation = difference.half_width * math.sqrt(num_seeds) / t.ppf(0.975, num_seeds - 1)
    narrow = (n for n in count(2) if t.ppf(0.975, n - 1) * deviation / math.sqrt(n) <= half_width)
    return next(narrow)


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values that count how many hypotheses are tested (Holm, 1979)."""
    return list(_holm(tuple(p_values))) if p_values else []


@cache  # many tables ask for the same, and statsmodels collects garbage each time
def _holm(p_values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(float(each) for each in multipletests(p_values, method="holm")[1])
