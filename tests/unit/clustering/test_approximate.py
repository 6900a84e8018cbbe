import numpy as np
import pytest
from scipy.stats import binomtest

from mlcd.clustering import approximate
from mlcd.clustering.approximate import (
    ApproximateScan,
    audit,
    divide,
    fewest_probes,
    wilson_interval,
)
from mlcd.clustering.nearest import nearest_centers
from mlcd.errors import ConfigInvalid
from mlcd.types import unit_rows


def families(num_families, members, dimension, spread=0.3, seed=0):
    """Centers around common directions, as those of real embeddings lie."""
    generator = np.random.default_rng(seed)
    middle = np.repeat(
        unit_rows(generator.standard_normal((num_families, dimension))), members, axis=0
    )
    return unit_rows(middle + spread / dimension**0.5 * generator.standard_normal(middle.shape))


@pytest.fixture(scope="module")
def centers():
    return families(60, 40, 32)


@pytest.fixture(scope="module")
def scan(centers):
    return ApproximateScan(centers, divide(centers))


@pytest.fixture(scope="module")
def rows(centers):
    generator = np.random.default_rng(1)
    return unit_rows(
        centers[generator.integers(0, len(centers), 300)]
        + 0.05 * generator.standard_normal((300, 32))
    )


@pytest.mark.parametrize("top", [1, 2, 8, 32])
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_with_every_cell_it_is_the_exact_answer(scan, centers, rows, top, threshold):
    found = scan.nearest(rows, top, threshold, probes=10_000)
    exact = nearest_centers(rows, centers, top, threshold)
    assert (found.ids == exact.ids).all()
    assert (found.scores == exact.scores).all()


@pytest.mark.parametrize("probes", [1, 3])
def test_of_the_cells_looked_at_the_answer_is_exact(centers, rows, probes):
    cells = divide(centers)
    found = ApproximateScan(centers, cells).nearest(rows, 8, probes=probes).ids
    looked_at = nearest_centers(rows, cells.vectors, probes).ids
    for row, ids, near in zip(rows, found, looked_at, strict=True):
        members = np.flatnonzero(np.isin(cells.of_center, near))
        best = nearest_centers(row[None], centers[members], 8).ids[0]
        assert ids.tolist() == np.where(best >= 0, members[best], -1).tolist()


def test_ties_go_to_the_lower_id_and_no_batch_changes_them(monkeypatch):
    centers = np.concatenate([families(30, 20, 16)] * 3)
    rows = families(10, 5, 16, seed=1)
    scan = ApproximateScan(centers, divide(centers))
    whole = scan.nearest(rows, 40, probes=4)
    assert (np.diff(whole.scores, axis=1) <= 0).all()
    ties = np.diff(whole.scores, axis=1) == 0
    assert ties.any()
    assert (np.diff(whole.ids, axis=1)[ties] > 0).all()
    monkeypatch.setattr(approximate, "_BATCH_ROWS", 7)
    assert (scan.nearest(rows, 40, probes=4).ids == whole.ids).all()


def test_where_the_cells_hold_too_few_the_list_is_short(centers, scan):
    found = scan.nearest(centers[:5], 1000, probes=1)
    assert (found.ids[:, -1] == -1).all()
    assert np.isneginf(found.scores[:, -1]).all()
    assert (found.ids[:, 0] == np.arange(5)).all()


def test_the_audit_counts_what_was_missed(scan, centers, rows):
    exact = nearest_centers(rows, centers, 8).ids
    assert audit(scan, rows, exact, 10_000).recall == 1.0
    few, more = audit(scan, rows, exact, 1), audit(scan, rows, exact, 4)
    found = scan.nearest(rows, 8, probes=1).ids
    hits = [len(set(a) & set(b)) for a, b in zip(found.tolist(), exact.tolist(), strict=True)]
    assert few.recall == pytest.approx(sum(hits) / exact.size)
    assert few.low < few.recall < few.high
    assert few.recall < more.recall


def test_the_fewest_probes_that_suffice_are_chosen(scan, centers, rows):
    exact = nearest_centers(rows, centers, 8).ids
    probes = fewest_probes(scan, np.tile(rows, (3, 1)), np.tile(exact, (3, 1)))
    assert audit(scan, np.tile(rows, (3, 1)), np.tile(exact, (3, 1)), probes).low >= 0.99


def test_data_without_structure_are_refused():
    generator = np.random.default_rng(0)
    centers = unit_rows(generator.standard_normal((5000, 128)))
    rows = unit_rows(generator.standard_normal((400, 128)))
    scan = ApproximateScan(centers, divide(centers))
    with pytest.raises(ConfigInvalid, match="--mode exact"):
        fewest_probes(scan, rows, nearest_centers(rows, centers, 8).ids)


@pytest.mark.parametrize(("num", "refused"), [(380, True), (381, False)])
def test_too_few_rows_to_show_the_recall_are_told_from_a_low_one(scan, centers, rows, num, refused):
    """With 381 rows that all find theirs the lower bound is 0.99."""
    few = np.resize(rows, (num, rows.shape[1]))
    exact = scan.nearest(few, 8, probes=64).ids  # so the recall is 1
    if refused:
        with pytest.raises(
            ConfigInvalid, match=r"380 embeddings .* are too few to show a recall of 0.99"
        ):
            fewest_probes(scan, few, exact)
    else:
        assert fewest_probes(scan, few, exact) <= 64


def test_few_centers_are_refused(centers):
    with pytest.raises(ConfigInvalid, match="at least 1000 centers, got 999"):
        divide(centers[:999])


@pytest.mark.parametrize(("found", "num"), [(9, 10), (50, 100), (0, 7), (1987, 2000), (2000, 2000)])
def test_the_interval_is_wilsons(found, num):
    expected = binomtest(found, num).proportion_ci(0.95, method="wilson")
    assert wilson_interval(found / num, num) == pytest.approx(
        (expected.low, expected.high), abs=1e-12
    )
