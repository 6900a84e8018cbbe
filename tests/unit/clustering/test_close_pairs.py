"""The pairs above a cosine: exactly those of all pairs in float64, wherever the rows lie."""

import numpy as np
import pytest

from mlcd.clustering import close_pairs as module
from mlcd.clustering.close_pairs import close_pairs
from mlcd.collections.duplicates import duplicate_groups, joined_groups
from mlcd.types import unit_rows


@pytest.fixture(autouse=True)
def few_rows_have_cells(monkeypatch):
    monkeypatch.setattr(module, "_LEAST_ROWS", 400)


class Meter:
    def __init__(self):
        self.done = 0

    def advance(self, num=1, **_):
        self.done += num


def planted(num, dimension, seed=0):
    """Families of rows at all distances from their parents, exact copies among them."""
    rng = np.random.default_rng(seed)
    parents = rng.standard_normal((num // 8, dimension))
    spread = rng.random((num, 1)) * (rng.random((num, 1)) > 0.1)
    rows = parents[rng.integers(0, len(parents), num)]
    return unit_rows(rows + 0.5 * spread * rng.standard_normal((num, dimension)))


@pytest.mark.parametrize("similarity", [0.8, 0.96, 1.0])
@pytest.mark.parametrize(("num", "dimension"), [(0, 8), (1, 8), (300, 4), (900, 8), (900, 64)])
def test_the_pairs_are_those_of_all_pairs(num, dimension, similarity):
    rows, meter = planted(num, dimension) if num > 1 else np.ones((num, 8), np.float32), Meter()
    found = close_pairs(rows, similarity, meter=meter)
    exact = rows.astype(np.float64)
    scores = np.einsum("nd,md->nm", exact, exact) if num < 1000 else exact @ exact.T
    first, second = np.nonzero(np.triu(scores >= similarity, 1))
    near = np.abs(scores[np.triu_indices(num, 1)] - similarity) < 1e-12
    if not near.any():  # another order of summation could decide these otherwise
        np.testing.assert_array_equal((found.first, found.second), (first, second))
        np.testing.assert_allclose(found.similarities, scores[first, second], atol=1e-12)
    assert (found.first < found.second).all()
    assert meter.done == num


def test_copies_of_few_images_are_pairs_and_no_fault():
    rows = np.repeat(planted(80, 8)[:3], 300, axis=0)
    found = close_pairs(rows, 0.999999, meter=Meter())
    groups = joined_groups(len(rows), found.first, found.second)
    assert len(found.first) >= 3 * 300 * 299 // 2
    assert len(groups) == len(np.unique(rows, axis=0))


def test_the_groups_are_those_of_all_pairs_and_most_products_are_saved():
    rng = np.random.default_rng(1)
    things = rng.standard_normal((60, 32))
    photos = np.repeat(things, 40, axis=0) + 0.7 * rng.standard_normal((2400, 32))
    copies = photos[:300] + 0.05 * rng.standard_normal((300, 32))
    rows = unit_rows(np.concatenate([photos, copies]))
    found = close_pairs(rows, 0.97, meter=Meter())
    expected = duplicate_groups(len(rows), lambda a, b: rows[a:b], 0.97, meter=Meter())
    groups = joined_groups(len(rows), found.first, found.second)
    assert [each.tolist() for each in groups] == [each.rows.tolist() for each in expected]
    assert len(groups) >= 250
    assert found.num_compared < len(rows) ** 2 / 2 / 5
