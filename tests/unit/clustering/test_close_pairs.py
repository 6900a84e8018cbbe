"""The pairs above a cosine: exactly those of all pairs in float64, wherever the rows lie."""

import numpy as np
import pytest

from mlcd.clustering import cells as cells_module
from mlcd.clustering import close_pairs as module
from mlcd.clustering.close_pairs import ClosePairs, PairSearch
from mlcd.types import min_dot_product, unit_rows


@pytest.fixture(autouse=True)
def few_rows_have_cells_and_tiles(monkeypatch):
    monkeypatch.setattr(cells_module, "_LEAST_ROWS", 200)
    monkeypatch.setattr(cells_module, "_LEAST_MEMBERS", 30)
    monkeypatch.setattr(module, "_BLOCK_ROWS", 64)
    monkeypatch.setattr(module, "_EXACT_ENTRIES", 1 << 15)


def planted(num, dimension, seed=0):
    """Families of rows at all distances from their parents, exact copies among them."""
    rng = np.random.default_rng(seed)
    parents = rng.standard_normal((num // 8, dimension))
    spread = rng.random((num, 1)) * (rng.random((num, 1)) > 0.1)
    rows = parents[rng.integers(0, len(parents), num)]
    return unit_rows(rows + 0.5 * spread * rng.standard_normal((num, dimension)))


def all_found(rows, similarity, **options):
    search = PairSearch(len(rows), rows.__getitem__, similarity, **options)
    parts = [pairs for cell in range(search.cells.num_cells) for pairs in search.of_cell(cell)]
    return ClosePairs.joined(parts) if parts else ClosePairs(*np.zeros((3, 0), np.int64))


@pytest.mark.parametrize("similarity", [-0.1, 0.8, 0.96, 1.0])
@pytest.mark.parametrize(
    ("num", "dimension"), [(0, 8), (1, 8), (150, 4), (400, 8), (400, 64), (400, 200)]
)
def test_the_pairs_are_those_of_all_pairs(num, dimension, similarity):
    rows = planted(num, dimension) if num > 1 else np.ones((num, 8), np.float32)
    exact = rows.astype(np.float64)
    scores = exact @ exact.T
    least = min_dot_product(similarity)
    first, second = np.nonzero(np.triu(scores >= least, 1))
    unclear = np.abs(scores[np.triu_indices(num, 1)] - least).min(initial=1) < 1e-12
    for num_own in (None, num // 3):
        found = all_found(rows, similarity, num_own=num_own)
        of_both = np.ones(len(first), bool)
        if num_own is not None:
            of_both = (first < num_own) & (second >= num_own)
        order = np.lexsort((found.second, found.first))
        pairs = (found.first[order], found.second[order])
        assert (found.first < found.second).all()
        assert len(set(zip(*map(np.ndarray.tolist, pairs), strict=True))) == len(order)
        if unclear:  # another order of summation could decide these otherwise
            continue
        np.testing.assert_array_equal(pairs, (first[of_both], second[of_both]))
        expected = scores[first[of_both], second[of_both]]
        np.testing.assert_allclose(found.similarities[order], expected, atol=1e-6)


def test_cells_rule_most_pairs_out_around_clusters():
    rng = np.random.default_rng(1)
    things = rng.standard_normal((60, 32))
    photos = np.repeat(things, 40, axis=0) + 0.7 * rng.standard_normal((2400, 32))
    rows = unit_rows(photos)
    cells = PairSearch(len(rows), rows.__getitem__, 0.97).cells
    compared = sum(
        len(cells.members(cell)) * (len(cells.earlier_near(cell)) + len(cells.members(cell)) / 2)
        for cell in range(cells.num_cells)
    )
    assert sum(len(cells.members(cell)) for cell in range(cells.num_cells)) == len(rows)
    assert compared < len(rows) ** 2 / 2 / 4


def test_a_search_ends_where_it_is_told_to():
    rows = planted(900, 16)

    def tick():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PairSearch(len(rows), rows.__getitem__, 0.9, tick=tick)
