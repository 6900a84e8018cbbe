"""Differences between arms that share their seeds, by one residual of all arms together.

A value is the sum of its arm's, its seed's and a residual. Where every arm has every seed, each
difference has the same interval, of (seeds - 1) (arms - 1) degrees of freedom.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t


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


@dataclass(frozen=True)
class Pooled:
    """The least squares of values = arm + seed + residual.

    Every arm may have seeds of its own: a seed that only one arm has decides nothing. effects: of
    each arm, [A]. covariance: theirs, but for the variance of the residual, [A, A]. deviation: the
    standard deviation of the residual. freedom: its degrees of freedom.
    """

    arms: tuple[str, ...]
    effects: NDArray[np.float64]
    covariance: NDArray[np.float64]
    deviation: float
    freedom: int

    @classmethod
    def of(cls, by_arm: Mapping[str, Mapping[int, float]]) -> "Pooled":
        """Fits the values by arm and seed. Two arms are compared by way of seeds that both have."""
        arms = tuple(by_arm)
        seeds = sorted(set().union(*by_arm.values()))
        places = [(arm, seed) for arm in arms for seed in by_arm[arm]]
        values = np.array([by_arm[arm][seed] for arm, seed in places])
        columns = np.zeros((len(places), len(arms) + len(seeds)))
        for row, (arm, seed) in enumerate(places):
            columns[row, arms.index(arm)] = 1
            columns[row, len(arms) + seeds.index(seed)] = 1
        inverse = np.linalg.pinv(columns.T @ columns, hermitian=True).astype(np.float64)
        solved = inverse @ columns.T @ values
        freedom = len(places) - int(np.linalg.matrix_rank(columns))
        left = float(((values - columns @ solved) ** 2).sum())
        num = len(arms)
        deviation = math.sqrt(left / freedom) if freedom else math.nan
        return cls(arms, solved[:num], inverse[:num, :num], deviation, freedom)

    def difference(self, arm: str, other: str, *, margin: float) -> Difference:
        """Returns the first arm less the other."""
        contrast = np.zeros(len(self.arms))
        contrast[self.arms.index(arm)] += 1
        contrast[self.arms.index(other)] -= 1
        mean = float(contrast @ self.effects)
        spread = math.sqrt(float(contrast @ self.covariance @ contrast))
        # Values without any residual still have a p-value.
        error = max(self.deviation * spread, sys.float_info.min)
        return Difference(
            mean,
            float(t.ppf(0.975, self.freedom)) * error,
            2 * float(t.sf(abs(mean) / error, self.freedom)),
            float(t.sf((margin - abs(mean)) / error, self.freedom)),
        )


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values that count how many hypotheses are tested (Holm, 1979)."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    raised = np.maximum.accumulate(np.minimum(1.0, np.asarray(p_values)[order] * factors))
    found = np.empty(len(p_values))
    found[order] = raised
    return [float(each) for each in found]
