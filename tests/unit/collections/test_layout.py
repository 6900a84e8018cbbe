"""The layout of a collection: stable, within its square, a fair sample from the start."""

import numpy as np
import pytest

from mlcd.collections.by_row import ByRow
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.collections.plane import Plane, Projection, fit_square, write_layout
from mlcd.types import unit_rows
from tests.unit.collections.conftest import DIMENSION, FINGERPRINT


def by_id(layout):
    ids = [layout.state.ids[position] for position in layout.positions.tolist()]
    return dict(zip(ids, map(tuple, layout.points.tolist()), strict=True))


def test_it_is_the_projection_on_two_components(filled, vectors):
    layout = filled.layout()
    assert layout.method == "pca"
    assert len(layout.points) == 400
    assert np.abs(layout.points).max() <= 1
    order = [int(item_id[1:]) for item_id in by_id(layout)]
    centered = vectors[order] - vectors.mean(axis=0)
    _, _, components = np.linalg.svd(centered, full_matrices=False)
    for axis in range(2):
        expected = centered @ components[axis]
        assert abs(np.corrcoef(expected, layout.points[:, axis])[0, 1]) > 0.999


def test_the_same_items_have_the_same_layout(tmp_path, vectors):
    digests = set()
    for name in ("a", "b"):
        with Collection.create(
            tmp_path / name, fingerprint=FINGERPRINT, dimension=DIMENSION
        ) as collection:
            collection.add([Item(f"i{n}", vector) for n, vector in enumerate(vectors)])
            digests.add(collection.layout().digest)
            collection.update_metadata("i3", {"n": 1})
            digests.add(collection.layout().digest)
    assert len(digests) == 1


def test_the_first_are_a_fair_sample(collection):
    rows = unit_rows(np.random.default_rng(0).standard_normal((4000, DIMENSION)))
    collection.add([Item(f"i{n}", row) for n, row in enumerate(rows)])
    numbers = np.array([int(item_id[1:]) for item_id in by_id(collection.layout())])
    assert abs(numbers[:400].mean() - 2000) < 200


def test_changes_move_no_other_item(filled, vectors):
    before = by_id(filled.layout())
    filled.add([Item("new", vectors[5]), Item("i7", vectors[6])])
    filled.delete("i0")
    after = by_id(filled.layout())
    assert after.keys() == (before.keys() | {"new"}) - {"i0"}
    moved = {
        item_id for item_id in before.keys() & after.keys() if before[item_id] != after[item_id]
    }
    assert moved == {"i7"}
    assert after["new"] == before["i5"]
    assert after["i7"] == before["i6"]


def test_few_items_and_equal_ones_have_a_layout(collection):
    assert collection.layout().points.shape == (0, 2)
    for num in (1, 2, 5):
        collection.add([Item(f"i{n}", np.eye(DIMENSION)[0]) for n in range(num)])
        assert collection.layout().points == pytest.approx(0, abs=1e-6)


def test_a_stored_layout_is_shown_and_new_items_stand_between_neighbors(filled, vectors):
    filled.reindex()
    searcher = filled.state
    rows = np.sort(searcher.rows[: searcher.num_positions])
    points = fit_square(np.random.default_rng(0).standard_normal((400, 2)))
    write_layout(filled.path, ByRow(rows, points), {"method": "tsne"})
    filled.add([Item("new", vectors[5])])
    filled._views.placer._key = None
    layout = filled.layout()
    assert layout.method == "tsne"
    found = by_id(layout)
    stored = dict(zip(rows.tolist(), map(tuple, points.tolist()), strict=True))
    for item_id in ("i0", "i5", "i399"):
        assert found[item_id] == stored[int(searcher.rows[searcher.position_of[item_id]])]
    assert np.abs(found["new"]).max() <= 1


def test_of_a_stored_layout_of_few_items_nothing_is_shown(filled):
    searcher = filled.state
    rows = np.sort(searcher.rows[: searcher.num_positions])[:100]
    write_layout(filled.path, ByRow(rows, np.zeros((100, 2), np.float32)), {"method": "tsne"})
    assert filled.layout().method == "pca"


def test_a_polygon_chooses_what_is_inside(filled):
    points = np.random.default_rng(0).uniform(-1, 1, (2000, 2)).astype(np.float32)
    layout = Plane(filled.state, "pca", np.arange(2000), points)
    triangle = np.array([[-0.5, -0.5], [0.7, -0.4], [0.1, 0.8]])

    def side(a, b):
        return (b[0] - a[0]) * (points[:, 1] - a[1]) - (b[1] - a[1]) * (points[:, 0] - a[0])

    sides = [side(triangle[n], triangle[(n + 1) % 3]) > 0 for n in range(3)]
    assert layout.inside(triangle).tolist() == np.flatnonzero(np.all(sides, axis=0)).tolist()
    square = np.array([[-2, -2], [2, -2], [2, 2], [-2, 2]])
    assert len(layout.inside(square)) == 2000
    assert len(layout.inside(square + 9)) == 0


def test_a_projection_of_nothing_and_of_one_dimension():
    assert Projection.of(np.zeros((3, 4), np.float32)).points(
        np.zeros((2, 4), np.float32)
    ).shape == (
        2,
        2,
    )
    line = np.linspace(-1, 1, 9, dtype=np.float32)[:, None]
    assert Projection.of(line).points(line).shape == (9, 2)
