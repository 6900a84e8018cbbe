"""Differences between arms that share their seeds, by one residual of all arms together.

A value is the sum of its arm's, its seed's and a residual. Where every arm has every seed, each
difference has the same interval, of (seeds - 1) (arms - 1) degrees of freedom.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t
from statsmodels.regression.linear_model import OLS, RegressionResults
from statsmodels.stats.multitest import multipletests


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
    """The least squares of values = arm + seed + residual. Its columns are the arms', then those of
    all seeds but the first.

    Every arm may have seeds of its own: a seed that only one arm has decides nothing.
    """

    arms: tuple[str, ...]
    fitted: RegressionResults

    @classmethod
    def of(cls, by_arm: Mapping[str, Mapping[int, float]]) -> "Pooled":
        """Fits the values by arm and seed. Two arms are compared by way of seeds that both have."""
        arms = tuple(by_arm)
        seeds = sorted(set().union(*by_arm.values()))
        places = [(arm, seed) for arm in arms for seed in by_arm[arm]]
        values = np.array([by_arm[arm][seed] for arm, seed in places])
        columns = np.zeros((len(places), len(arms) + len(seeds) - 1))
        for row, (arm, seed) in enumerate(places):
            columns[row, arms.index(arm)] = 1
            if later := seeds.index(seed):
                columns[row, len(arms) + later - 1] = 1
        return cls(arms, OLS(values, columns).fit())

    def difference(self, arm: str, other: str, *, margin: float) -> Difference:
        """Returns the first arm less the other."""
        contrast = np.zeros(len(self.fitted.params))
        contrast[self.arms.index(arm)] += 1
        contrast[self.arms.index(other)] -= 1
        found, above, below = (
            self.fitted.t_test((contrast[None], bound)) for bound in (0.0, -margin, margin)
        )
        low, high = found.conf_int()[0]
        freedom = self.fitted.df_resid
        return Difference(
            float(found.effect[0]),
            float(high - low) / 2,
            float(found.pvalue),
            float(max(t.sf(above.tvalue.item(), freedom), t.cdf(below.tvalue.item(), freedom))),
        )


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values that count how many hypotheses are tested (Holm, 1979)."""
    return [float(each) for each in multipletests(p_values, method="holm")[1]]
