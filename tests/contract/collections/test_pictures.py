"""One suite for every store of collections: an item shows its own picture, on every server, and never
that of an earlier vector.
"""

import numpy as np
import pytest

from mlcd.collections.item import Item
from mlcd.errors import NotFound
from mlcd.images.thumbnail import Thumbnail
from tests.contract.collections.conftest import DIMENSION, FINGERPRINT

IDS = ["a/b c.jpg", "é日本🙂", "'; DROP TABLE items; --", "%s %(x)s {}"]


def picture(name, size=3000):
    return Thumbnail((name.encode() + bytes(range(256)) * size)[:size])


def item(item_id, vector, name=None, **metadata):
    return Item(item_id, vector, metadata, None if name is None else picture(name))


def check(collection, wanted):
    """The collection shows these pictures, by id, whichever way it is asked."""
    ids = sorted(item.id for block in collection.items() for item in block)
    shown = {item_id: picture(name) for item_id, name in wanted.items()}
    assert collection.read_thumbnails(ids) == shown
    assert {item_id: collection.thumbnail(item_id) for item_id in ids} == {
        item_id: shown.get(item_id) for item_id in ids
    }
    versions = [shown[item_id].version if item_id in shown else None for item_id in ids]
    assert collection.thumbnail_versions(ids) == versions
    assert sorted(collection.without_thumbnail()) == [each for each in ids if each not in shown]


@pytest.fixture
def pictured(collection, vectors):
    """Four items with a picture, and one without."""
    collection.add([item(item_id, vectors[n], item_id) for n, item_id in enumerate(IDS)])
    collection.add([item("bare", vectors[9])])
    return collection


def test_every_server_shows_each_item_its_own(store, opened, pictured):
    wanted = {item_id: item_id for item_id in IDS}
    check(pictured, wanted)
    assert pictured.takes_thumbnails
    with pytest.raises(NotFound):
        pictured.thumbnail("nobody")
    assert pictured.read_thumbnails(["nobody"]) == {}
    assert pictured.thumbnail_versions(["nobody", "bare"]) == [None, None]
    if pictured.promises.writers == "one":
        store.close()
    check(opened().get("c"), wanted)


def test_a_picture_stays_with_its_vector(pictured, vectors):
    first, second, third, fourth = IDS
    assert pictured.add([item(first, vectors[0])]) == ["unchanged"]
    assert pictured.add([item(first, vectors[0], n=1)]) == ["updated"]
    assert pictured.update_metadata(first, {"n": 2}) == "updated"
    assert pictured.add([item(second, vectors[20])]) == ["updated"]
    assert pictured.add([item(third, vectors[21], "new")]) == ["updated"]
    assert pictured.add([item(fourth, vectors[3], "other")]) == ["unchanged"]
    assert pictured.add([item("bare", vectors[9], "late", n=3)]) == ["updated"]
    check(pictured, {first: first, third: "new", fourth: "other", "bare": "late"})


def test_a_picture_goes_with_its_item(pictured, vectors):
    first, second, *rest = IDS
    pictured.delete(first)
    pictured.delete_all([second])
    check(pictured, {item_id: item_id for item_id in rest})
    pictured.add([item(first, vectors[0])])
    check(pictured, {item_id: item_id for item_id in rest})


def test_items_that_exist_get_pictures_and_others_do_not(pictured):
    pictured.add_thumbnails(
        {"bare": picture("late"), IDS[0]: picture("new"), "nobody": picture("x")}
    )
    check(pictured, {**{item_id: item_id for item_id in IDS}, "bare": "late", IDS[0]: "new"})


def test_pictures_go_with_the_collection(store, pictured, vectors):
    store.delete("c")
    again, _ = store.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION)
    again.add([item(IDS[0], vectors[0])])
    check(again, {})


def test_thousands_of_pictures_are_read(collection):
    rows = np.random.default_rng(1).standard_normal((1500, DIMENSION))
    ids = [f"i{n}" for n in range(len(rows))]
    collection.add([item(item_id, rows[n], item_id) for n, item_id in enumerate(ids)])
    assert collection.without_thumbnail() == []
    assert collection.read_thumbnails(ids) == {item_id: picture(item_id) for item_id in ids}
