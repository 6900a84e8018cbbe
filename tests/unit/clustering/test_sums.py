import numpy as np
import pytest

from mlcd.clustering import row_threads, sums
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.repair import next_centers
from mlcd.clustering.sums import ClusterSums
from mlcd.errors import InvalidInput
from mlcd.types import unit_rows

GENERATOR = np.random.default_rng(0)
ROWS = unit_rows(GENERATOR.standard_normal((5000, 12)))
CLUSTERS = GENERATOR.integers(0, 7, 5000)


def totals_of(rows, clusters, num_clusters=7):
    totals = ClusterSums.zeros(num_clusters, rows.shape[1])
    totals.add(rows, clusters)
    return totals


def test_sums_are_the_definition_and_no_order_changes_a_bit():
    totals = totals_of(ROWS, CLUSTERS)
    expected = np.stack([ROWS[k == CLUSTERS].astype(np.float64).sum(axis=0) for k in range(7)])
    assert totals.sums / sums.SCALE == pytest.approx(expected, abs=1000 * 2**-34)
    order = GENERATOR.permutation(5000)
    parts = ClusterSums.zeros(7, 12)
    for part in np.array_split(order, 13):
        parts.add(ROWS[part], CLUSTERS[part])
    assert parts.sums.tobytes() == totals.sums.tobytes()
    assert (parts.sizes == np.bincount(CLUSTERS)).all()


def test_threads_over_columns_change_no_bit(monkeypatch):
    alone = totals_of(ROWS, CLUSTERS)
    monkeypatch.setattr(sums, "_WORTH_THREADS", 1)
    monkeypatch.setattr(sums, "_LEAST_COLUMNS", 1)
    monkeypatch.setattr(row_threads, "allowed_threads", lambda: 5)  # 12 columns: uneven shares
    shared = totals_of(ROWS, CLUSTERS)
    assert shared.sums.tobytes() == alone.sums.tobytes()
    shared.subtract(ROWS, CLUSTERS)
    assert not shared.sums.any()


def test_rows_that_move_leave_no_trace():
    totals = totals_of(ROWS, np.zeros(5000, dtype=int))
    totals.subtract(ROWS, np.zeros(5000, dtype=int))
    totals.add(ROWS, CLUSTERS)
    assert totals.sums.tobytes() == totals_of(ROWS, CLUSTERS).sums.tobytes()


def test_more_rows_than_a_sum_can_hold_are_refused(monkeypatch):
    monkeypatch.setattr(sums, "MAX_ROWS", 100)
    with pytest.raises(InvalidInput, match="more than 100 rows"):
        totals_of(ROWS, CLUSTERS)


def test_the_objective_is_the_mean_of_the_products():
    centers = unit_rows(GENERATOR.standard_normal((8, 12)))
    totals = totals_of(ROWS, CLUSTERS, 8)
    products = np.einsum("nd,nd->n", ROWS.astype(np.float64), centers[CLUSTERS].astype(np.float64))
    assert totals.objective(centers) == pytest.approx(products.mean(), abs=1e-9)
    assert totals.cosines(centers)[:7] == pytest.approx(
        [products[k == CLUSTERS].mean() for k in range(7)], abs=1e-9
    )
    assert np.isnan(totals.cosines(centers)[7])


def test_a_cluster_without_direction_moves_beside_the_largest():
    rows = unit_rows(np.array([[1.0, 0], [-1, 0], [0, 1], [0.01, 1], [0.02, 1]]))
    centers, repaired = next_centers(totals_of(rows, np.array([0, 0, 1, 1, 1]), 2), rows[:2], 0, 0)
    assert repaired == 1
    assert np.linalg.norm(centers, axis=1) == pytest.approx([1, 1], abs=1e-6)
    assert centers[1] == pytest.approx(unit_rows(rows[2:].sum(axis=0, keepdims=True))[0], abs=1e-7)
    assert (centers @ rows[3]).min() > 0.999
    assert not np.array_equal(centers[0], centers[1])


def test_of_equal_centers_the_first_stays_and_the_largest_is_split_again_and_again():
    rows = unit_rows(
        np.array([[1.0, 0, 0]] * 4 + [[0, 1, 0.1]] * 3 + [[0, 1, -0.1]] * 3 + [[0, 0, 1.0]])
    )
    clusters = np.array([0, 0, 1, 1, *([2] * 6), 5])
    centers, repaired = next_centers(totals_of(rows, clusters, 6), rows[:6], 3, 1)
    assert repaired == 3  # one equal, two empty
    # Not beside the first cluster, large as it is: its rows are all the same.
    assert (centers[[1, 3, 4]] @ centers[2]).min() > 0.999
    assert len({center.tobytes() for center in centers}) == 6
    again, _ = next_centers(totals_of(rows, clusters, 6), rows[:6], 3, 1)
    assert again.tobytes() == centers.tobytes()


def test_where_all_rows_cancel_out_the_centers_stay():
    rows = unit_rows(np.array([[1.0, 0], [-1, 0]]))
    result = kmeans([rows], 1, iterations=5)
    assert result.centers.tobytes() in {row.tobytes() for row in rows}
    assert set(result.objective) == {0.0}
    assert result.sizes.tolist() == [2]
