"""Differences between arms that share their seeds, by one residual of all arms together.

A value is the sum of its arm's, its seed's and a residual: the additive model of a complete block
design. Every difference then has the same interval, of (seeds - 1) (arms - 1) degrees of freedom.
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
    """Values [S, A] of S seeds and A arms, by the arms' names."""

    arms: tuple[str, ...]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, by_arm: Mapping[str, Mapping[int, float]]) -> "Pooled":
        """Takes the seeds that all arms have."""
        seeds = sorted(set.intersection(*(set(values) for values in by_arm.values())))
        rows = [[values[seed] for values in by_arm.values()] for seed in seeds]
        return cls(tuple(by_arm), np.array(rows, np.float64).reshape(len(seeds), len(by_arm)))

    @property
    def deviation(self) -> float:
        """Returns the standard deviation of the residual."""
        values = self.values
        left = values - values.mean(axis=1)[:, None] - values.mean(axis=0) + values.mean()
        return math.sqrt(float((left**2).sum()) / self._freedom)

    @property
    def _freedom(self) -> int:
        return (len(self.values) - 1) * (len(self.arms) - 1)

    def difference(self, arm: str, other: str, *, margin: float) -> Difference:
        """Returns the first arm less the other."""
        of_arm = dict(zip(self.arms, self.values.mean(axis=0).tolist(), strict=True))
        mean = of_arm[arm] - of_arm[other]
        # Values without any residual still have a p-value.
        error = max(self.deviation * math.sqrt(2 / len(self.values)), sys.float_info.min)
        freedom = self._freedom
        return Difference(
            mean,
            float(t.ppf(0.975, freedom)) * error,
            2 * float(t.sf(abs(mean) / error, freedom)),
            float(t.sf((margin - abs(mean)) / error, freedom)),
        )


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values that count how many hypotheses are tested (Holm, 1979)."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    raised = np.maximum.accumulate(np.minimum(1.0, np.asarray(p_values)[order] * factors))
    found = np.empty(len(p_values))
    found[order] = raised
    return [float(each) for each in found]
