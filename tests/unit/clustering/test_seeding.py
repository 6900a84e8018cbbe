import numpy as np
import pytest

from mlcd.clustering import kmeans as trainer
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.rows import ArrayRows
from mlcd.clustering.seeding import distinct_rows, sampled, shared_out, two_level
from mlcd.errors import InvalidInput
from mlcd.randomness import permutation
from mlcd.types import unit_rows
from mlcd.world import World

ROWS = unit_rows(np.random.default_rng(0).standard_normal((3000, 12)))


def one_level(rows, num_clusters, seed):
    return kmeans(
        rows, num_clusters, seed=seed, iterations=5, start=distinct_rows(rows, num_clusters, seed)
    ).centers


def test_first_centers_are_the_distinct_rows_of_lowest_hash():
    doubled = np.repeat(ROWS, 2, axis=0)
    chosen = distinct_rows(ArrayRows([doubled[:100], doubled[100:]]), 50, 9)
    expected = list(dict.fromkeys(row // 2 for row in permutation(len(doubled), 9)))[:50]
    assert chosen.tobytes() == ROWS[expected].tobytes()


def test_all_the_distinct_rows_can_be_asked_for_and_no_more():
    rows = ArrayRows([np.repeat(ROWS[:9], 500, axis=0)])
    assert len({row.tobytes() for row in distinct_rows(rows, 9, 0)}) == 9
    with pytest.raises(
        InvalidInput, match="10 clusters were asked of 9 distinct embeddings: ask for at most 9"
    ):
        distinct_rows(rows, 10, 0)


def test_shares_follow_mass_within_their_limits():
    mass, limit = np.array([60, 30, 9, 1, 0]), np.array([100, 100, 100, 100, 0])
    assert shared_out(10, mass, limit).tolist() == [5, 3, 1, 1, 0]
    assert shared_out(10, mass, np.array([2, 100, 100, 1, 0])).sum() == 10
    assert shared_out(10, mass, np.array([2, 100, 100, 1, 0])).tolist() == [2, 5, 2, 1, 0]
    assert shared_out(103, mass, np.array([1, 100, 1, 1, 0])).tolist() == [1, 100, 1, 1, 0]


def test_samples_are_rows_of_lowest_hash_in_their_order():
    drawn = sampled(ArrayRows([ROWS]), 100, 3)
    assert (np.diff(drawn.selected) > 0).all()
    assert (drawn.selected == sampled(ArrayRows([ROWS[:7], ROWS[7:]]), 100, 3).selected).all()
    whole = ArrayRows([ROWS])
    assert sampled(whole, 3000, 3) is whole


def test_two_levels_start_about_as_well_as_one_ends(monkeypatch):
    rows = ArrayRows([ROWS])
    start = two_level(rows, 200, 0, one_level, World())
    assert start.shape == (200, 12)
    assert start.tobytes() == two_level(rows, 200, 0, one_level, World()).tobytes()
    flat = kmeans([ROWS], 200, seed=0, iterations=25).objective[-1]
    assert kmeans([ROWS], 200, start=start, iterations=3).objective[-1] > 0.98 * flat
    # Above the bound k-means takes this way by itself.
    monkeypatch.setattr(trainer, "MANY_CLUSTERS", 150)
    result = kmeans([ROWS], 200, seed=0, iterations=3)
    assert result.objective[-1] > 0.98 * flat
    assert (result.sizes > 0).all()


@pytest.mark.parametrize(("num_clusters", "better"), [(93, True), (94, False), (49, False)])
def test_several_clusters_start_in_two_levels_where_rows_abound(monkeypatch, num_clusters, better):
    monkeypatch.setattr(trainer, "_SEVERAL_CLUSTERS", 50)
    [first] = kmeans(
        [ROWS[:2976]], num_clusters, seed=0, iterations=0
    ).objective  # 32 rows for each of 93 clusters
    random = distinct_rows(ArrayRows([ROWS[:2976]]), num_clusters, 0)
    [drawn] = kmeans([ROWS[:2976]], num_clusters, start=random, iterations=0).objective
    assert (first > 1.05 * drawn) is better
    assert better or first == drawn


def test_a_row_that_is_repeated_gets_no_more_centers():
    """Its cell would need them for the few other rows that it has."""
    random = np.random.default_rng(0)
    means = random.standard_normal((100, 32))[random.integers(0, 100, 3200)]
    rows = unit_rows(means + 0.6 * random.standard_normal(means.shape))
    rows[:1600] = rows[0]
    drawn = distinct_rows(ArrayRows([rows]), 100, 0)
    flat = kmeans([rows], 100, start=drawn).objective[-1]
    assert kmeans([rows], 100).objective[-1] > 0.995 * flat


def test_two_levels_refuse_and_serve_few_distinct_rows():
    rows = ArrayRows([np.repeat(ROWS[:50], 20, axis=0)])
    assert len({row.tobytes() for row in two_level(rows, 50, 0, one_level, World())}) == 50
    with pytest.raises(InvalidInput, match="at most 50 clusters"):
        two_level(rows, 51, 0, one_level, World())


def test_too_few_distinct_rows_for_the_coarse_cells_are_told_as_what_was_asked_for():
    rows = ArrayRows([np.repeat(ROWS[:3], 500, axis=0)])
    with pytest.raises(
        InvalidInput, match="50 clusters were asked of 3 distinct embeddings: ask for at most 3"
    ):
        two_level(rows, 50, 0, one_level, World())
