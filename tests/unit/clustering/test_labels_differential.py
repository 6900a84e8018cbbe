"""Labels against other people's code, on the same rows: equal up to ties."""

import faiss
import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import CenterScan, nearest_centers
from mlcd.types import unit_rows

pytestmark = pytest.mark.plain_cpu

TIE = 1e-6  # scores closer than this may change places: theirs are float32


@pytest.fixture(scope="module")
def rows():
    return unit_rows(np.random.default_rng(0).standard_normal((200, 48)))


@pytest.fixture(scope="module")
def centers():
    """Some at random, some in families of near-duplicates, some twice."""
    generator = np.random.default_rng(1)
    base = unit_rows(generator.standard_normal((700, 48)))
    families = unit_rows(
        np.repeat(base[:20], 8, axis=0) + 1e-4 * generator.standard_normal((160, 48))
    )
    return np.concatenate([base, families, base[:50]])


def assert_same_up_to_ties(rows, centers, ours, theirs):
    exact = rows.astype(np.float64) @ centers.astype(np.float64).T
    of_ours, of_theirs = (
        np.take_along_axis(exact, ids.astype(np.int64), axis=1) for ids in (ours, theirs)
    )
    assert np.abs(of_ours - of_theirs).max() < TIE
    # Where scores are no tie, the ids are the same.
    last = of_ours[:, -1:]
    for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        clear = {int(center) for center in np.flatnonzero(exact[row] > last[row] + TIE)}
        assert clear <= set(a.tolist())
        assert clear <= set(b.tolist())


@pytest.mark.parametrize("top", [1, 2, 8, 32])
@pytest.mark.parametrize("matmul", ["numpy", "torch-int8"])
def test_equals_faiss_knn(rows, centers, top, matmul):
    ours = CenterScan(centers, matmul=matmul).nearest(rows, top).ids
    theirs = faiss.knn(rows, centers, top, metric=faiss.METRIC_INNER_PRODUCT)[1]
    assert_same_up_to_ties(rows, centers, ours, theirs)


@pytest.mark.parametrize("top", [1, 2, 8, 32])
def test_equals_sklearn_brute_force(rows, centers, top):
    ours = nearest_centers(rows, centers, top).ids
    theirs = (
        NearestNeighbors(n_neighbors=top, algorithm="brute", metric="cosine")
        .fit(centers)
        .kneighbors(rows)[1]
    )
    assert_same_up_to_ties(rows, centers, ours, theirs)


@pytest.mark.parametrize("top", [1, 2, 8, 32])
@pytest.mark.parametrize("num_centers", [1, 5, 40])
def test_fewer_centers_than_labels_give_them_all(rows, top, num_centers):
    centers = unit_rows(np.random.default_rng(2).standard_normal((num_centers, 48)))
    found = nearest_centers(rows, centers, top)
    kept = min(top, num_centers)
    exact = rows.astype(np.float64) @ centers.astype(np.float64).T
    assert (found.ids[:, :kept] == np.argsort(-exact, axis=1, kind="stable")[:, :kept]).all()
    assert (found.ids[:, kept:] == -1).all()


def test_the_first_label_is_the_assignment_of_k_means(rows):
    result = kmeans([rows], 24, seed=3)
    assert (nearest_centers(rows, result.centers, 8).ids[:, 0] == result.assignment).all()


def test_the_first_label_of_a_center_is_itself(centers):
    first = nearest_centers(centers[:700], centers[:700], 2).ids[:, 0]
    assert (first == np.arange(700)).all()
