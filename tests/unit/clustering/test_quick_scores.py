import numpy as np
import pytest

from mlcd.clustering import quick_scores
from mlcd.clustering.certificate import order_error
from mlcd.clustering.exact_scores import ExactScores, exact_scores
from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.quick_scores import QuickScores, WideCenters, widened
from mlcd.clustering.torch_pairs import pair_scores
from mlcd.types import unit_rows

pytestmark = pytest.mark.plain_cpu


def drawn(num, dimension, seed):
    return unit_rows(np.random.default_rng(seed).standard_normal((num, dimension)))


def order_of(rows, centers):
    longest = float(np.linalg.norm(centers, axis=1).max())
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    return order_error(lengths, longest, rows.shape[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pairs_are_scored_in_the_type_of_their_vectors(dtype):
    rows, centers = drawn(20, 300, 0), drawn(50, 300, 1)
    of_rows = np.sort(np.random.default_rng(2).integers(0, 20, 400))
    ids = np.random.default_rng(3).integers(0, 50, 400)
    vectors = rows.astype(dtype), centers.astype(dtype)
    found = pair_scores(*vectors, of_rows, ids)
    expected = exact_scores(rows, centers, of_rows, ids)
    assert found.dtype == dtype
    assert np.abs(found - expected).max() < 300 * np.finfo(dtype).eps
    assert len(pair_scores(*vectors, of_rows[:0], ids[:0])) == 0


def middle_of_two_float32():
    """Scores that lie on the middle of two float32 numbers, and next to it."""
    rows = np.ones((3, 2), dtype=np.float32)
    halves = np.float32(2.0**-24) * np.array([1, 1 + 2.0**-20, 1 - 2.0**-20], dtype=np.float32)
    return rows, np.stack([np.ones(3, dtype=np.float32), halves], axis=1)


def near_ties():
    centers = np.repeat(drawn(1, 64, 0), 30, axis=0)
    centers[np.arange(30), np.arange(30)] += np.float32(1e-7)
    return drawn(10, 64, 1), centers


def equal_centers():
    return drawn(10, 64, 1), np.repeat(drawn(5, 64, 0), 4, axis=0)


def tie_for_the_last_place():
    row, other = drawn(2, 64, 0)
    return row[None], np.stack([other, row, other])


@pytest.mark.parametrize(
    "of", [middle_of_two_float32, near_ties, equal_centers, tie_for_the_last_place]
)
@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_summation_changes_an_answer(of, seed):
    rows, centers = of()
    order_B, random = order_of(rows, centers), np.random.default_rng(seed)

    def elsewhere(rows_BD, centers_KD, of_rows, ids):
        """The scores of another order of summation, as far away as one may be."""
        away = random.uniform(-0.5, 0.5, len(ids)) * order_B[of_rows]
        return exact_scores(rows, centers, of_rows, ids) + away

    quick = QuickScores(rows, WideCenters(centers, elsewhere), order_B)
    ids_BM = np.tile(np.arange(len(centers)), (len(rows), 1))
    exact, top = ExactScores(rows, centers), 2
    expected = exact.first(ids_BM, exact.of_each(ids_BM), top)
    found = quick.first(ids_BM, quick.of_each(ids_BM), top)
    assert (found[0] == expected[0]).all()
    assert (found[1].astype(np.float32) == expected[1].astype(np.float32)).all()


def test_an_id_of_none_has_no_score():
    rows, centers = drawn(3, 16, 0), drawn(5, 16, 1)
    quick = QuickScores(rows, WideCenters(centers, pair_scores), order_of(rows, centers))
    ids = np.array([[0, -1], [-1, -1], [4, 2]])
    exact = ExactScores(rows, centers).of_each(ids)
    assert np.isneginf(quick.of_each(ids)).tolist() == (ids < 0).tolist()
    assert quick.of_each(ids)[ids >= 0] == pytest.approx(exact[ids >= 0], abs=1e-14)


def test_few_centers_are_widened(monkeypatch):
    centers = drawn(5, 16, 1)
    assert widened(centers, None) is None
    assert widened(centers, pair_scores).wide_KD.dtype == np.float64
    monkeypatch.setattr(quick_scores, "_MOST_COMPONENTS", 79)
    assert widened(centers, pair_scores) is None


@pytest.mark.parametrize("matmul", ["torch-fp32", "torch-bf16", "torch-int8"])
@pytest.mark.parametrize("of", [near_ties, equal_centers])
def test_a_scan_has_the_answer_of_one_order(of, matmul):
    rows, centers = of()
    expected = CenterScan(centers, matmul="numpy").nearest(rows, 8)
    found = CenterScan(centers, matmul=matmul).nearest(rows, 8)
    assert (found.ids == expected.ids).all()
    assert (found.scores == expected.scores).all()
