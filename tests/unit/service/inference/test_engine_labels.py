"""Labels that an engine found: taken only where our own arithmetic gives the same."""

import numpy as np
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.clustering.nearest import CenterScan
from mlcd.service.inference.engine_labels import EngineLabels
from mlcd.service.inference.lookup import Lookup
from mlcd.types import unit_rows

NUM_CENTERS, TOP, DIGEST = 50, 6, "d" * 64


@pytest.fixture
def centers():
    random = np.random.default_rng(0)
    vectors = unit_rows(random.standard_normal((NUM_CENTERS, 16)).astype(np.float32))
    mean = 0.1 * random.standard_normal(16).astype(np.float32)
    return Centers(vectors, np.ones(NUM_CENTERS, np.int64), "f" * 64, mean=mean, digest=DIGEST)


@pytest.fixture
def rows():
    return unit_rows(np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32))


def found_elsewhere(centers, rows, top=TOP):
    ids, scores, _ = CenterScan(centers.vectors, matmul="numpy").search(centers.align(rows), top)
    engine_labels = EngineLabels(DIGEST, top)
    for row, *near in zip(rows, ids, scores, strict=True):
        engine_labels.add(row, *near)
    return engine_labels, ids, scores


@pytest.mark.parametrize(
    ("top", "threshold"), [(TOP, None), (3, None), (TOP, 0.3), (TOP + 1, None)]
)
def test_the_answer_is_the_scans_with_what_is_known_of_some(centers, rows, top, threshold):
    engine_labels, *_ = found_elsewhere(centers, rows[1:3])
    lookup = Lookup(centers)
    request = lookup.nearest(rows, top, threshold)
    given = lookup.nearest(rows, top, threshold, engine_labels=engine_labels)
    assert given.ids.tobytes() == request.ids.tobytes()
    assert given.scores.tobytes() == request.scores.tobytes()


def test_what_is_known_is_not_scanned_for_again(centers, rows, monkeypatch):
    engine_labels, *_ = found_elsewhere(centers, rows)
    lookup = Lookup(centers)
    monkeypatch.setattr(lookup, "scan", None)
    assert lookup.nearest(rows, TOP, engine_labels=engine_labels).ids.shape == (len(rows), TOP)


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda ids, scores: (np.roll(ids, 1), scores),
        lambda ids, scores: (ids, np.nextafter(scores, 2)),
        lambda ids, scores: (ids + NUM_CENTERS, scores),
        lambda ids, scores: (ids - NUM_CENTERS, scores),
    ],
)
def test_labels_of_another_row_or_of_other_centers_are_left_out(centers, rows, spoiled):
    engine_labels, ids, scores = found_elsewhere(centers, rows)
    engine_labels.add(rows[2], *spoiled(ids[2], scores[2]))
    has, *_ = engine_labels.of(rows, centers.align(rows), centers.vectors, TOP)
    assert has.tolist() == [True, True, False, True]


def test_labels_by_centers_of_another_digest_are_not_looked_at(centers, rows, monkeypatch):
    engine_labels, *_ = found_elsewhere(centers, rows)
    engine_labels.centers = "e" * 64
    monkeypatch.setattr(engine_labels, "of", None)
    lookup = Lookup(centers)
    found = lookup.nearest(rows, TOP, engine_labels=engine_labels).ids.tolist()
    assert found == lookup.nearest(rows, TOP).ids.tolist()


@pytest.mark.parametrize(("id_before", "id_after"), [(0, -1), (NUM_CENTERS - 1, NUM_CENTERS)])
def test_an_id_that_would_be_read_as_the_first_or_last_center_is_left_out(
    centers, rows, id_before, id_after
):
    engine_labels, ids, scores = found_elsewhere(
        centers, rows, top=NUM_CENTERS
    )  # lists of all centers
    engine_labels.add(rows[2], np.where(ids[2] == id_before, id_after, ids[2]), scores[2])
    has, *_ = engine_labels.of(rows, centers.align(rows), centers.vectors, NUM_CENTERS)
    assert has.tolist() == [True, True, False, True]
