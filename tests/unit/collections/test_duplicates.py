"""Groups are the connected components of all pairs above the similarity, whatever the tiles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcd.collections.duplicates import duplicate_groups, num_tile_pairs
from mlcd.errors import InvalidInput
from mlcd.types import unit_rows


class Counter:
    def __init__(self):
        self.done = 0

    def advance(self, num=1, **facts):
        self.done += num


def components(rows, similarity):
    """By SciPy, over the whole matrix."""
    from scipy.sparse.csgraph import connected_components

    near = rows.astype(np.float64) @ rows.astype(np.float64).T >= similarity
    _, labels = connected_components(near, directed=False)
    groups = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]
    return sorted(group for group in groups if len(group) > 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 17), st.integers(0, 2**31))
def test_they_are_the_connected_components(num_rows, tile_rows, seed):
    generator = np.random.default_rng(seed)
    middles = generator.standard_normal((6, 5))
    rows = unit_rows(
        middles[generator.integers(6, size=num_rows)]
        + 0.3 * generator.standard_normal((num_rows, 5))
    )
    widest = []

    def read(start, stop):
        widest.append(stop - start)
        return rows[start:stop]

    counter = Counter()
    found = duplicate_groups(num_rows, read, 0.93, meter=counter, tile_rows=tile_rows)
    assert [group.rows.tolist() for group in found] == components(rows, 0.93)
    cosines = rows @ rows.T - 3 * np.eye(num_rows)
    for group in found:
        nearest = cosines[group.rows][:, group.rows].max(axis=1)
        np.testing.assert_allclose(group.similarities, nearest, atol=1e-6)
    assert max(widest, default=0) <= tile_rows
    assert counter.done == num_tile_pairs(num_rows, tile_rows)


def test_a_chain_is_one_group():
    angles = np.deg2rad(np.arange(0, 90, 10))
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    found = duplicate_groups(
        9, lambda start, stop: rows[start:stop], 0.98, meter=Counter(), tile_rows=2
    )
    assert [group.rows.tolist() for group in found] == [list(range(9))]


def test_a_group_tells_how_alike_each_of_its_items_is_to_another():
    rows = unit_rows(np.array([[1, 0], [1, 0.1], [1, 0], [0, 1]]))
    (group,) = duplicate_groups(
        4, lambda start, stop: rows[start:stop], 0.9, meter=Counter(), tile_rows=2
    )
    assert group.record("abcd") == {"ids": ["a", "b", "c"], "similarities": [1.0, 0.995037, 1.0]}


def test_many_copies_are_one_group():
    rows = np.ones((3000, 1), dtype=np.float32)
    found = duplicate_groups(
        3000, lambda start, stop: rows[start:stop], 1.0, meter=Counter(), tile_rows=512
    )
    assert [len(group.rows) for group in found] == [3000]


def test_a_similarity_that_is_no_cosine_is_refused():
    with pytest.raises(InvalidInput, match="no cosine"):
        duplicate_groups(1, lambda start, stop: None, 1.5, meter=Counter())
