import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcd.clustering import nearest
from mlcd.clustering.nearest import nearest_centers
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.types import unit_rows


def brute_force(z, centers, top, threshold=None):
    """float64, a double loop, the total order spelled out."""
    ids = np.full((len(z), top), -1)
    scores = np.full((len(z), top), -np.inf)
    for row in range(len(z)):
        exact = [float(np.dot(z[row].astype(np.float64), center.astype(np.float64))) for center in centers]
        order = sorted(range(len(centers)), key=lambda j: (-exact[j], j))
        kept = [j for j in order[:top] if threshold is None or exact[j] >= threshold]
        ids[row, : len(kept)] = kept
        scores[row, : len(kept)] = [exact[j] for j in kept]
    return ids, scores


def random_rows(num, dimension, seed=0):
    return unit_rows(np.random.default_rng(seed).standard_normal((num, dimension)))


@pytest.mark.parametrize("top", [1, 2, 8, 32])
@pytest.mark.parametrize("threshold", [None, 0.1, 0.99])
def test_equals_brute_force(top, threshold):
    z, centers = random_rows(40, 16), random_rows(101, 16, seed=1)
    found = nearest_centers(z, centers, top, threshold)
    ids, scores = brute_force(z, centers, top, threshold)
    assert (found.ids == ids).all()
    assert found.scores == pytest.approx(scores, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), dimension=st.integers(1, 4), num=st.integers(1, 40), top=st.integers(1, 12))
def test_ties_go_to_the_lower_id(seed, dimension, num, top):
    generator = np.random.default_rng(seed)
    # Few distinct directions: many exact ties, duplicate centers among them.
    centers = unit_rows(generator.choice([-1.0, 1.0, 2.0], size=(num, dimension)))
    z = unit_rows(generator.choice([-1.0, 1.0], size=(5, dimension)))
    ids, _ = brute_force(z, centers, top)
    assert (nearest_centers(z, centers, top).ids == ids).all()


def test_all_negative_similarities_and_more_labels_than_centers():
    centers = -random_rows(3, 8) - 0.5
    z = unit_rows(np.ones((2, 8)))
    found = nearest_centers(z, unit_rows(centers), 5)
    assert (found.ids[:, :3] >= 0).all()
    assert (found.scores[:, :3] < 0).all()
    assert (found.ids[:, 3:] == -1).all()
    assert np.isneginf(found.scores[:, 3:]).all()


def test_near_ties_below_float32_are_ordered_by_the_exact_score():
    generator = np.random.default_rng(0)
    base = unit_rows(generator.standard_normal((1, 256)))
    centers = np.repeat(base, 500, axis=0)
    centers[np.arange(500), generator.integers(0, 256, 500)] += np.float32(1e-8)
    z = random_rows(20, 256, seed=1)
    assert (nearest_centers(z, centers, 8).ids == brute_force(z, centers, 8)[0]).all()


def test_the_answer_does_not_depend_on_the_block(monkeypatch):
    z, centers = random_rows(57, 32), random_rows(77, 32, seed=1)
    whole = nearest_centers(z, centers, 8)
    monkeypatch.setattr(nearest, "_BLOCK_ENTRIES", 77 * 5)
    blocked = nearest_centers(z, centers, 8)
    assert (whole.ids == blocked.ids).all()
    assert (whole.scores == blocked.scores).all()


def test_a_shorter_list_is_a_prefix_of_a_longer_one():
    z, centers = random_rows(30, 16), random_rows(50, 16, seed=1)
    assert (nearest_centers(z, centers, 3).ids == nearest_centers(z, centers, 9).ids[:, :3]).all()


def test_permuted_centers_permute_the_labels():
    z, centers = random_rows(30, 16), random_rows(50, 16, seed=1)
    order = np.random.default_rng(2).permutation(50)
    assert (order[nearest_centers(z, centers[order], 4).ids] == nearest_centers(z, centers, 4).ids).all()


def test_bad_rows_are_named():
    z = random_rows(4, 8)
    z[2, 3] = np.nan
    with pytest.raises(InvalidInput, match="embeddings row 2"):
        nearest_centers(z, random_rows(5, 8))
    with pytest.raises(InvalidInput, match="same model"):
        nearest_centers(random_rows(4, 8), random_rows(5, 9))
    with pytest.raises(ConfigInvalid, match="top"):
        nearest_centers(random_rows(4, 8), random_rows(5, 8), 0)


def test_no_rows_give_no_labels():
    assert nearest_centers(np.zeros((0, 8), np.float32), random_rows(5, 8), 3).ids.shape == (0, 3)
