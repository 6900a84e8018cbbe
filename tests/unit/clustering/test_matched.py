"""Old clusters and new ones of the same rows: the same pairs as a dense table gives, in less."""

import tracemalloc

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from mlcd.clustering.novelty import matched


def rows_shared(before, since, nums):
    """Returns the dense table of pairs that count."""
    shared = np.zeros(nums, np.int64)
    np.add.at(shared, (before, since), 1)
    either = np.minimum(shared.sum(axis=1)[:, None], shared.sum(axis=0)[None, :])
    return np.where(2 * shared > either, shared, 0)


@pytest.mark.parametrize("seed", range(20))
def test_as_many_rows_stay_as_in_a_dense_table(seed):
    rng = np.random.default_rng(seed)
    nums = tuple(rng.integers(1, 12, 2))
    before = rng.integers(0, nums[0], 80)
    moved = rng.random(80) < 0.4
    since = np.where(moved, rng.integers(0, nums[1], 80), before % nums[1])
    counted = rows_shared(before, since, nums)
    old, new = linear_sum_assignment(counted, maximize=True)
    found = matched(before, since, nums)
    real = np.flatnonzero(found >= 0)
    assert len(set(found[real].tolist())) == len(real)
    assert (counted[found[real], real] > 0).all()
    assert counted[found[real], real].sum() == counted[old, new].sum()


def test_many_clusters_take_no_table():
    num = 10_000
    before = np.repeat(np.arange(num), 4)
    since = np.roll(np.arange(num), 7)[before]
    tracemalloc.start()
    found = matched(before, since, (num, num))
    assert tracemalloc.get_traced_memory()[1] < 200 * 4 * num
    tracemalloc.stop()
    assert (found[since] == before).all()


def test_no_rows_match_nothing():
    none = np.empty(0, np.int32)
    assert matched(none, none, (2, 3)).tolist() == [-1, -1, -1]
