"""The clusters of a collection agree with a plain computation, after every change."""

import numpy as np
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.clustering.nearest import nearest_centers
from mlcd.collections.clusters import CLUSTERS
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.errors import Conflict
from mlcd.types import unit_rows
from tests.unit.collections.conftest import DIMENSION, FINGERPRINT

NUM = 7
VECTORS = unit_rows(np.random.default_rng(5).standard_normal((NUM, DIMENSION)))
PLAIN = Centers(VECTORS, np.ones(NUM, np.int64), FINGERPRINT)
WITH_MEAN = Centers(
    VECTORS, np.ones(NUM, np.int64), FINGERPRINT, mean=np.full(DIMENSION, 0.1, np.float32)
)


class Counting:
    """The look-up of some centers, which counts the rows that it was asked for."""

    def __init__(self, centers=PLAIN, digest="d" * 64):
        self.centers, self.digest, self.rows = centers, digest, 0

    def __call__(self, rows):
        self.rows += len(rows)
        return nearest_centers(self.centers.align(rows), self.centers.vectors, 1)

    def of(self, collection):
        return collection.clusters(self.digest, num_centers=NUM, nearest=self)


def expected(collection, centers=PLAIN):
    ids, take = collection.rows()
    found = nearest_centers(centers.align(take(np.arange(len(ids)))), centers.vectors, 1)
    members = {center: [] for center in range(NUM)}
    for item_id, center, score in zip(ids, found.ids[:, 0], found.scores[:, 0], strict=True):
        members[int(center)].append((-score, item_id))
    return {center: [(i, -s) for s, i in sorted(found)] for center, found in members.items()}


def listed(clusters):
    return {
        center: [
            (clusters.state.ids[position], similarity)
            for position, similarity in zip(
                clusters.positions[clusters.members(center)],
                clusters.similarities[clusters.members(center)],
                strict=True,
            )
        ]
        for center in range(NUM)
    }


@pytest.mark.parametrize("centers", [PLAIN, WITH_MEAN])
def test_members_are_those_of_a_plain_computation_after_every_change(filled, vectors, centers):
    look_up = Counting(centers)
    assert listed(look_up.of(filled)) == expected(filled, centers)
    assert look_up.rows == 400
    twins = [Item(f"twin{n}", vectors[n // 3]) for n in range(30)]
    filled.add(twins)
    filled.delete_all(["i1", "i7", "twin3"])
    filled.add([Item("i2", vectors[300])])
    filled.update_metadata("i3", {"new": 1})
    clusters = look_up.of(filled)
    assert listed(clusters) == expected(filled, centers)
    assert look_up.rows == 430
    filled.reindex()
    assert listed(look_up.of(filled)) == expected(filled, centers)
    assert look_up.rows == 430
    centers_of = dict(enumerate(clusters.centers().tolist()))
    for center in range(NUM):
        for position in clusters.positions[clusters.members(center)]:
            assert centers_of.pop(int(position)) == center
    assert set(centers_of.values()) == {-1}


def test_spread_and_novelty_are_those_of_the_members(filled):
    clusters = Counting().of(filled)
    for center, members in listed(clusters).items():
        far = [1 - similarity for _, similarity in members]
        assert clusters.num_members[center] == len(members)
        assert clusters.spread[center] == pytest.approx(np.mean(far), abs=1e-6)
        assert clusters.novelty(0.6)[center] == pytest.approx(np.mean(np.array(far) > 0.6))


def test_a_center_without_members_has_neither(collection):
    collection.add([Item("a", VECTORS[2])])
    clusters = Counting().of(collection)
    assert clusters.num_members.tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert np.isnan(clusters.spread).sum() == NUM - 1
    assert np.isnan(clusters.novelty(0.5)).sum() == NUM - 1


def test_the_next_page_begins_behind_an_item_even_if_it_is_gone(filled, vectors):
    filled.add([Item(f"twin{n}", vectors[0]) for n in range(9)])
    clusters = Counting().of(filled)
    for members in listed(clusters).values():
        for place, (item_id, similarity) in enumerate(members):
            center = int(clusters.centers()[clusters.state.position_of[item_id]])
            start = clusters.members(center).start
            assert clusters.behind(center, similarity, item_id) == start + place + 1
    center = int(clusters.centers()[clusters.state.position_of["twin4"]])
    similarity = dict(listed(clusters)[center])["twin4"]
    filled.delete("twin4")
    fresh = Counting().of(filled)
    after = fresh.behind(center, similarity, "twin4")
    assert fresh.state.ids[fresh.positions[after]] == "twin5"


def test_they_are_kept_beside_it_and_made_again_where_damaged(tmp_path, vectors):
    path = tmp_path / "c"
    with Collection.create(path, fingerprint=FINGERPRINT, dimension=DIMENSION) as collection:
        collection.add([Item(f"i{n}", vector) for n, vector in enumerate(vectors)])
        first = listed(Counting().of(collection))
    with Collection.open(path) as collection:
        again = Counting()
        assert listed(again.of(collection)) == first
        assert again.rows == 0
        other = Counting(digest="e" * 64)
        other.of(collection)
        assert other.rows == 400
    (file,) = (path / CLUSTERS).glob("*.npz")
    assert file.stem == "e" * 16
    for damage in (b"no zip", file.read_bytes()[:-50], file.read_bytes().replace(b"\0", b"\1")):
        file.write_bytes(damage)
        with Collection.open(path, read_only=True) as collection:
            again = Counting(digest="e" * 64)
            assert listed(again.of(collection)) == first
            assert again.rows == 400


def test_a_collection_that_is_closed_is_given_up(filled):
    filled.close()
    with pytest.raises(Conflict, match="closed"):
        Counting().of(filled)
