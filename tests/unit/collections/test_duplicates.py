"""Groups are the connected components of all pairs above the similarity, whatever the cells."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcd.clustering import cells
from mlcd.collections import duplicates
from mlcd.collections.duplicates import duplicate_groups
from mlcd.errors import InvalidInput
from mlcd.types import unit_rows


class Counter:
    def __init__(self):
        self.done = 0

    def advance(self, num=1, **facts):
        self.done += num


def components(rows, similarity):
    """Finds components by SciPy, over the whole matrix."""
    from scipy.sparse.csgraph import connected_components

    near = rows.astype(np.float64) @ rows.astype(np.float64).T >= similarity
    _, labels = connected_components(near, directed=False)
    groups = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]
    return sorted(group for group in groups if len(group) > 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 17), st.integers(0, 2**31))
def test_they_are_the_connected_components(num_rows, least_rows, seed):
    generator = np.random.default_rng(seed)
    middles = generator.standard_normal((6, 5))
    rows = unit_rows(
        middles[generator.integers(6, size=num_rows)]
        + 0.3 * generator.standard_normal((num_rows, 5))
    )
    rows = rows[np.minimum(np.arange(num_rows), num_rows * 4 // 5)]  # the last are equal
    counter = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "_LEAST_ROWS", least_rows)
        patch.setattr(cells, "_LEAST_MEMBERS", 1 + least_rows // 4)
        found = duplicate_groups(num_rows, rows.__getitem__, 0.93, meter=counter)
    assert [group.rows.tolist() for group in found] == components(rows, 0.93)
    cosines = rows @ rows.T - 3 * np.eye(num_rows)
    for group in found:
        nearest = cosines[group.rows][:, group.rows].max(axis=1)
        np.testing.assert_allclose(group.similarities, nearest, atol=1e-6)
    assert counter.done == num_rows


def test_copies_that_were_rounded_otherwise_are_near_by_a_similarity_of_one():
    rows = unit_rows(np.random.default_rng(0).standard_normal((60, 48)))
    both = np.concatenate([rows, unit_rows(rows * np.float32(0.3))])
    found = duplicate_groups(120, both.__getitem__, 1.0, meter=Counter())
    assert [group.rows.tolist() for group in found] == [[row, row + 60] for row in range(60)]
    assert {similarity for group in found for similarity in group.similarities.tolist()} == {1.0}


def test_a_group_tells_how_alike_each_of_its_items_is_to_another():
    rows = unit_rows(np.array([[1, 0], [1, 0.1], [1, 0], [0, 1]]))
    (group,) = duplicate_groups(4, rows.__getitem__, 0.9, meter=Counter())
    assert group.record("abcd") == {"ids": ["a", "b", "c"], "similarities": [1.0, 0.995037, 1.0]}


def test_many_copies_are_one_group():
    rows = np.ones((3000, 1), dtype=np.float32)
    found = duplicate_groups(3000, rows.__getitem__, 1.0, meter=Counter())
    assert [len(group.rows) for group in found] == [3000]


def test_a_similarity_that_is_no_cosine_is_refused():
    with pytest.raises(InvalidInput, match="must be a cosine"):
        duplicate_groups(1, None, 1.5, meter=Counter())


class Killed(Counter):
    """A meter whose process dies after so many rows."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def advance(self, num=1, **facts):
        super().advance(num)
        if self.done > self.after:
            raise KeyboardInterrupt


def test_a_killed_search_goes_on_and_finds_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "_LEAST_ROWS", 100)
    monkeypatch.setattr(cells, "_LEAST_MEMBERS", 25)
    monkeypatch.setattr(duplicates, "_CHECKPOINT_INTERVAL_S", 0)
    generator = np.random.default_rng(0)
    parents = generator.standard_normal((60, 8))
    rows = unit_rows(np.repeat(parents, 10, 0) + 0.3 * generator.standard_normal((600, 8)))
    whole = duplicate_groups(600, rows.__getitem__, 0.95, meter=Counter())
    checkpoint = tmp_path / "checkpoint.npz"
    for after in (200, 400):
        with pytest.raises(KeyboardInterrupt):
            duplicate_groups(
                600, rows.__getitem__, 0.95, meter=Killed(after), checkpoint=checkpoint
            )
    num_searched = int(np.load(checkpoint)["num_cells"])
    assert num_searched > 0
    searched = []
    of_cell = duplicates.PairSearch.of_cell
    monkeypatch.setattr(
        duplicates.PairSearch,
        "of_cell",
        lambda self, cell: searched.append(cell) or of_cell(self, cell),
    )
    again = duplicate_groups(600, rows.__getitem__, 0.95, meter=Counter(), checkpoint=checkpoint)
    assert min(searched) == num_searched
    assert [group.rows.tolist() for group in again] == [group.rows.tolist() for group in whole]
    for damaged in (checkpoint.read_bytes()[:50], b""):
        checkpoint.write_bytes(damaged)
        again = duplicate_groups(
            600, rows.__getitem__, 0.95, meter=Counter(), checkpoint=checkpoint
        )
        assert [group.rows.tolist() for group in again] == [group.rows.tolist() for group in whole]
    for similarity in (0.95, 0.9):  # the checkpoint of another similarity is ignored
        duplicate_groups(600, rows.__getitem__, 0.9, meter=Counter(), checkpoint=checkpoint)
        again = duplicate_groups(
            600, rows.__getitem__, similarity, meter=Counter(), checkpoint=checkpoint
        )
        alone = duplicate_groups(600, rows.__getitem__, similarity, meter=Counter())
        assert [group.rows.tolist() for group in again] == [group.rows.tolist() for group in alone]
