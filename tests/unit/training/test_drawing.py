import numpy as np
import pytest

from mlcd.training.data.drawing import draw_labels


@pytest.fixture(scope="module")
def stored():
    return np.random.default_rng(0).permuted(
        np.tile(np.arange(50, dtype=np.int32), (2000, 1)), axis=1
    )[:, :10]


def test_each_label_is_drawn_as_often_as_any_other_and_none_twice(stored):
    drawn = draw_labels(stored, np.arange(2000), 8, seed=3)
    assert (drawn.shape, drawn.dtype) == ((2000, 8), np.int32)
    places = np.array(
        [
            [row.tolist().index(label) for label in taken]
            for row, taken in zip(stored, drawn, strict=True)
        ]
    )
    assert (np.diff(places, axis=1) > 0).all()  # none twice, and the nearest still come first
    often = np.bincount(places.ravel(), minlength=10) / 2000
    assert np.abs(often - 0.8).max() < 5 * np.sqrt(0.8 * 0.2 / 2000)


def test_what_is_drawn_depends_on_position_and_seed_only(stored):
    positions = np.arange(2000) + 10_000
    all_at_once = draw_labels(stored, positions, 8, seed=3)
    assert np.array_equal(
        all_at_once[700:710], draw_labels(stored[700:710], positions[700:710], 8, seed=3)
    )
    again = draw_labels(stored, positions + 2000, 8, seed=3)
    for other in (again, draw_labels(stored, positions, 8, seed=4)):
        # Two independent draws of 8 of 10 agree once in 45 times.
        assert 0.01 < (other == all_at_once).all(axis=1).mean() < 0.04


def test_no_label_is_taken_only_where_nothing_else_is_left(stored):
    few = stored[:100].copy()
    few[:50, 9:] = -1
    few[50:, 3:] = -1
    drawn = draw_labels(few, np.arange(100), 8, seed=3)
    assert (drawn[:50] >= 0).all()
    assert drawn[50:, :3].tolist() == few[50:, :3].tolist()
    assert (drawn[50:, 3:] == -1).all()


def test_all_of_them_are_as_they_were(stored):
    assert draw_labels(stored, np.arange(2000), 10, seed=3) is stored
