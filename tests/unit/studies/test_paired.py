"""Paired differences and their tests, against the formulas of a textbook."""

import math

import numpy as np
import pytest
from scipy.stats import t

from studies.losses.instrument.paired import holm, paired_difference, seeds_for


def by_seed(values):
    return dict(enumerate(values.tolist()))


def test_a_difference_and_its_tests_are_those_of_the_textbook():
    rng = np.random.default_rng(1)
    shared = rng.standard_normal(9)
    first, second = rng.standard_normal((2, 9)) * 0.3 + shared + [[0.1], [0.0]]
    found = paired_difference(by_seed(first), by_seed(second), margin=0.5)
    apart = first - second
    error = apart.std(ddof=1) / 3
    assert found.mean == pytest.approx(apart.mean())
    assert found.half_width == pytest.approx(t.ppf(0.975, 8) * error)
    assert found.p == pytest.approx(2 * t.sf(abs(apart.mean()) / error, 8))
    assert found.p_equal == pytest.approx(
        max(t.sf((apart.mean() + 0.5) / error, 8), t.cdf((apart.mean() - 0.5) / error, 8))
    )


def test_seeds_that_only_one_arm_has_decide_nothing():
    rng = np.random.default_rng(2)
    first, second = by_seed(rng.standard_normal(8)), by_seed(rng.standard_normal(6))
    shared = {seed: first[seed] for seed in range(6)}
    found = paired_difference(first | {99: 5.0}, second, margin=0.5)
    assert found == paired_difference(shared, second, margin=0.5)


def test_nothing_is_said_of_a_difference_that_never_varies_but_that_the_same_is_equal():
    same = paired_difference({1: 0.5, 2: 0.5}, {1: 0.5, 2: 0.5}, margin=0.1)
    assert (same.mean, same.half_width, same.p, same.p_equal) == (0, 0, 1, 0)
    other = paired_difference({1: 1.0, 2: 1.0}, {1: 0.5, 2: 0.5}, margin=0.1)
    assert (other.mean, other.half_width, other.p, other.p_equal) == (0.5, math.inf, 1, 1)


def test_seeds_for_an_interval_are_those_that_its_formula_needs():
    found = paired_difference(
        dict(enumerate([0.0, 1.0] * 5)), dict.fromkeys(range(10), 0.0), margin=1
    )
    deviation = math.sqrt(10 * 0.25 / 9)
    needed = seeds_for(found, 10, 0.2)
    assert t.ppf(0.975, needed - 1) * deviation / math.sqrt(needed) <= 0.2
    assert t.ppf(0.975, needed - 2) * deviation / math.sqrt(needed - 1) > 0.2
    assert seeds_for(found, 10, 1.001 * found.half_width) == 10


def test_holm_raises_what_is_tested_among_many():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
