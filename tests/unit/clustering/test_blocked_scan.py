"""A scan of centers in blocks has the bits of one scan of all, ties included."""

import numpy as np
import pytest

from mlcd.clustering.kmeans import assign, assign_in_block, nearest_of_blocks, sum_in_block
from mlcd.clustering.nearest import BlockedScan, CenterScan
from mlcd.clustering.rows import ArrayRows, UnitRows
from mlcd.errors import InvalidInput
from mlcd.types import unit_rows


def rows_with_ties(num, dimension, seed):
    """Few directions, so that many scores are equal, and equal centers lie in several blocks."""
    generator = np.random.default_rng(seed)
    return unit_rows(generator.choice([-1.0, 1.0, 2.0], (num, dimension)).astype(np.float32))


@pytest.mark.parametrize("at_once", [1, 7, 50, 101, 500])
@pytest.mark.parametrize(("top", "threshold"), [(1, None), (8, None), (8, 0.4), (120, None)])
def test_the_nearest_are_those_of_one_scan(at_once, top, threshold):
    for dimension in (3, 24):
        z, centers = rows_with_ties(60, dimension, 0), rows_with_ties(101, dimension, 1)
        alone = CenterScan(centers, matmul="numpy").nearest(z, top, threshold)
        found = BlockedScan(ArrayRows([centers]), at_once).nearest(z, top, threshold)
        assert found.ids.dtype == alone.ids.dtype
        assert found.ids.tobytes() == alone.ids.tobytes()
        assert found.scores.tobytes() == alone.scores.tobytes()
        assert found.scan is not None
        counts = (found.scan.proven, found.scan.wider, found.scan.float32, found.scan.float64)
        assert sum(counts) == len(z)


def test_refuses_rows_of_another_dimension():
    with pytest.raises(InvalidInput, match="embeddings have dimension 3, centers 4"):
        BlockedScan(ArrayRows([rows_with_ties(9, 4, 0)]), 5).nearest(rows_with_ties(2, 3, 0))


@pytest.mark.parametrize("at_once", [1, 6, 40])
def test_the_members_and_sums_are_those_of_one_pass(at_once):
    rows = UnitRows(ArrayRows([rows_with_ties(300, 5, 0)]))
    centers = rows_with_ties(40, 5, 1)
    ids, sums = assign(rows, centers, None)
    parts = [range(start, min(start + at_once, 40)) for start in range(0, 40, at_once)]
    found = [assign_in_block(rows, centers[part.start : part.stop], part.start) for part in parts]
    ours = nearest_of_blocks(*found)
    np.testing.assert_array_equal(ours, ids)
    summed = [sum_in_block(rows, ours, part) for part in parts]
    np.testing.assert_array_equal(np.concatenate([each.sums for each in summed]), sums.sums)
    np.testing.assert_array_equal(np.concatenate([each.sizes for each in summed]), sums.sizes)
