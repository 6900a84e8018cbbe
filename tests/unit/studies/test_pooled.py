"""The pooled model of arms and seeds, against ordinary least squares on dummy columns."""

import numpy as np
import pytest
from scipy.stats import t, ttest_1samp, ttest_rel

from studies.losses.instrument.pooled import Pooled, holm


def of_a_complete_block(values):
    """The half width where every arm has every seed, by the sums of squares of the textbook."""
    left = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0) + values.mean()
    freedom = (len(values) - 1) * (values.shape[1] - 1)
    return t.ppf(0.975, freedom) * np.sqrt((left**2).sum() / freedom * 2 / len(values))


def test_a_difference_is_that_of_least_squares():
    rng = np.random.default_rng(0)
    seeds, arms = 7, ["a", "b", "c"]
    values = rng.standard_normal((seeds, 3)) + rng.standard_normal((seeds, 1)) + [0, 1, 2]
    by_arm = {arm: dict(enumerate(values[:, each])) for each, arm in enumerate(arms)}
    by_arm["b"][99] = 5.0  # a seed that the others lack
    found = Pooled.of(by_arm).difference("c", "a", margin=0.5)
    assert found.half_width == pytest.approx(of_a_complete_block(values))

    design = np.zeros((seeds * 3, seeds + 2))
    for seed in range(seeds):
        for arm in range(3):
            design[3 * seed + arm, seed] = 1
            if arm:
                design[3 * seed + arm, seeds + arm - 1] = 1
    solved, residual, *_ = np.linalg.lstsq(design, values.ravel(), rcond=None)
    freedom = seeds * 3 - seeds - 2
    error = np.sqrt(residual[0] / freedom * np.linalg.inv(design.T @ design)[-1, -1])
    assert found.mean == pytest.approx(solved[-1])
    assert found.half_width == pytest.approx(t.ppf(0.975, freedom) * error)
    assert found.p == pytest.approx(2 * t.sf(solved[-1] / error, freedom))
    assert found.p_equal == pytest.approx(
        max(t.sf((solved[-1] + 0.5) / error, freedom), t.cdf((solved[-1] - 0.5) / error, freedom))
    )


def test_holm_raises_what_is_tested_among_many():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_of_two_arms_it_is_the_paired_test_and_equality_two_one_sided_ones():
    rng = np.random.default_rng(1)
    first, second = rng.standard_normal((2, 9)) * 0.3 + [[0.1], [0.0]]
    found = Pooled.of({"a": dict(enumerate(first)), "b": dict(enumerate(second))}).difference(
        "a", "b", margin=0.5
    )
    assert found.p == pytest.approx(ttest_rel(first, second).pvalue)
    above = ttest_1samp(first - second, -0.5, alternative="greater").pvalue
    below = ttest_1samp(first - second, 0.5, alternative="less").pvalue
    assert found.p_equal == pytest.approx(max(above, below))


def test_arms_may_lack_seeds():
    rng = np.random.default_rng(2)
    by_arm = {
        arm: {seed: rng.standard_normal() + seed for seed in range(8) if (seed, arm) not in gaps}
        for gaps in [{(0, "a"), (1, "b"), (5, "c"), (6, "c")}]
        for arm in "abc"
    }
    found = Pooled.of(by_arm).difference("b", "c", margin=0.5)
    rows = [(arm, seed, value) for arm in "abc" for seed, value in by_arm[arm].items()]
    design = np.array(
        [[seed == each for each in range(8)] + [arm == "a", arm == "b"] for arm, seed, _ in rows],
        float,
    )
    values = np.array([value for *_, value in rows])
    solved, residual, *_ = np.linalg.lstsq(design, values, rcond=None)
    freedom = len(rows) - 10
    error = np.sqrt(residual[0] / freedom * np.linalg.inv(design.T @ design)[-1, -1])
    assert found.mean == pytest.approx(solved[-1])
    assert found.half_width == pytest.approx(t.ppf(0.975, freedom) * error)
