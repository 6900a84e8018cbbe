"""The indexes of faiss, against brute force."""

import numpy as np
import pytest

from mlcd.errors import ArtifactInvalid
from mlcd.indexes.faiss import FaissIndex
from mlcd.types import unit_rows


@pytest.fixture
def rows():
    return unit_rows(np.random.default_rng(0).standard_normal((500, 24)))


@pytest.fixture
def index(rows):
    index = FaissIndex.train("flat", rows[:1], num_rows=500)
    index.add(rows[:200])
    index.add(rows[200:])
    return index


def test_it_finds_what_brute_force_finds(index, rows):
    queries = unit_rows(np.random.default_rng(1).standard_normal((50, 24)))
    scores = queries.astype(np.float64) @ rows.astype(np.float64).T
    expected = np.sort(scores, axis=1)[:, ::-1][:, :10]
    found = index.search(queries, 10)
    assert found.scores == pytest.approx(expected, abs=1e-5)
    assert np.take_along_axis(scores, found.ids, axis=1) == pytest.approx(expected, abs=1e-5)


def test_each_row_finds_itself(index, rows):
    assert (index.search(rows, 1).ids[:, 0] == np.arange(500)).all()


def test_more_than_there_is_gives_what_there_is(index):
    found = index.search(np.eye(24, dtype=np.float32)[:1], 600)
    assert (found.ids[0] >= 0).sum() == 500
    assert np.isneginf(found.scores[0, 500:]).all()


def test_it_survives_disk(index, rows, tmp_path):
    index.write(tmp_path / "index")
    again = FaissIndex.read(tmp_path / "index")
    assert (again.search(rows, 5).ids == index.search(rows, 5).ids).all()
    assert (again.num_rows, again.dimension) == (500, 24)


def test_a_file_that_is_no_index_is_refused(tmp_path):
    (tmp_path / "index").write_bytes(b"nothing")
    with pytest.raises(ArtifactInvalid, match="mlcd index"):
        FaissIndex.read(tmp_path / "index")


@pytest.fixture(params=["hnsw", "ivf-sq8", pytest.param("ivf-pq", marks=pytest.mark.slow)])
def approximate(request, rows):
    index = FaissIndex.train(request.param, rows, num_rows=500)
    index.add(rows)
    return index


def test_only_what_is_allowed_is_found(index, rows):
    allowed = np.arange(500) % 3 == 1
    found = index.search(rows[:50], 10, allowed=allowed)
    scores = np.where(allowed, rows[:50].astype(np.float64) @ rows.astype(np.float64).T, -np.inf)
    assert found.scores == pytest.approx(np.sort(scores, axis=1)[:, ::-1][:, :10], abs=1e-5)
    assert (found.ids % 3 == 1).all()


def test_nothing_allowed_finds_nothing(index, rows):
    found = index.search(rows[:3], 4, allowed=np.zeros(500, bool))
    assert (found.ids == -1).all()
    assert np.isneginf(found.scores).all()


def test_an_approximate_index_finds_only_what_is_allowed_and_survives_disk(
    approximate, rows, tmp_path
):
    allowed = np.arange(500) % 5 == 2
    approximate.write(tmp_path / "index")
    again = FaissIndex.read(tmp_path / "index")
    for index in (approximate, again):
        ids = index.search(rows[:50], 10, allowed=allowed, effort=64).ids
        assert (ids[ids >= 0] % 5 == 2).all()
        assert (ids >= 0).any()
    assert (
        again.search(rows, 5, effort=64).ids == approximate.search(rows, 5, effort=64).ids
    ).all()


def test_the_effort_of_one_search_is_no_other_searchs(approximate, rows):
    before = approximate.search(rows, 10, effort=1).ids
    approximate.search(rows, 10, effort=500)
    assert (approximate.search(rows, 10, effort=1).ids == before).all()
