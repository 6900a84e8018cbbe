"""One suite for every store of collections: what is acknowledged is there, once, as it was given."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mlcd.collections.item import Item
from mlcd.errors import ConfigInvalid, Conflict, InvalidInput, NotFound
from tests.contract.collections.conftest import DIMENSION, FINGERPRINT

OTHER = "b" * 64
ODD_IDS = [
    "a/b c.jpg",
    "é日本🙂",
    "'; DROP TABLE items; --",
    'quote"and\\backslash',
    "%s %(x)s {}",
    "x" * 1024,
    "A",
    "a",
]
METADATA = {
    "whole": 1,
    "number": 1.0,
    "large": 1e16,
    "exact": 2**53,
    "tiny": 5e-324,
    "yes": True,
    "none": None,
    "text": "é'\"\\🙂",
    "list": ["a", 1, False, ["nested"]],
    "nested": {"a": {"b": [1, 2]}},
    'a.b "$c': "odd name",
}


def test_a_collection_is_made_once_for_one_model(store):
    made, new = store.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION, recall=0.9)
    again, newer = store.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION)
    assert (new, newer, again) == (True, False, made)
    assert (made.fingerprint, made.dimension, made.recall_target) == (FINGERPRINT, DIMENSION, 0.9)
    for changed in ({"fingerprint": OTHER}, {"dimension": 3}, {"recall": 0.5}):
        with pytest.raises(Conflict, match="another name"):
            store.create("c", **{"fingerprint": FINGERPRINT, "dimension": DIMENSION} | changed)
    with pytest.raises(ConfigInvalid, match="recall must be in"):
        store.create("d", fingerprint=FINGERPRINT, dimension=DIMENSION, recall=1.0)
    with pytest.raises(InvalidInput, match="cannot name"):
        store.create("../d", fingerprint=FINGERPRINT, dimension=DIMENSION)
    with pytest.raises(ConfigInvalid, match="requires embeddings of the model"):
        made.check_fingerprint(OTHER)
    assert list(store.all()) == ["c"]


def test_a_collection_that_was_deleted_is_gone_with_its_items(store, filled):
    store.delete("c")
    assert store.find("c") is None
    for lost in (store.get, store.delete):
        with pytest.raises(NotFound):
            lost("c")
    with pytest.raises((Conflict, NotFound)):
        filled.add([Item("more", np.ones(DIMENSION))])
    again, made = store.create("c", fingerprint=OTHER, dimension=3)
    assert made
    assert len(again) == 0
    assert again.add([Item("i0", np.ones(3))]) == ["created"]


def test_an_answer_says_what_became_of_each_item(collection, vectors):
    first = [Item("a", vectors[0], {"n": 1}), Item("b", vectors[1])]
    assert collection.add(first) == ["created", "created"]
    changed = [
        Item("a", vectors[2], {"n": 1}),
        Item("b", vectors[1], {"n": 2}),
        Item("c", vectors[3]),
    ]
    assert collection.add(changed) == ["updated", "updated", "created"]
    assert collection.add(changed) == ["unchanged"] * 3
    assert collection.update_metadata("c", {"n": 3}) == "updated"
    assert collection.update_metadata("c", {"n": 3}) == "unchanged"
    assert collection.delete_all(["c", "nowhere"]) == ["deleted", "missing"]
    collection.delete("b")
    for ask in (
        lambda: collection.delete("b"),
        lambda: collection.update_metadata("b", {}),
        lambda: collection.get("b"),
        lambda: collection.embedding_of("b"),
    ):
        with pytest.raises(NotFound, match="'b'"):
            ask()
    assert collection.metadata_of("b") is None
    assert len(collection) == collection.describe().items == 1
    assert collection.add([]) == []


def test_items_come_back_as_they_were_given(collection, opened, place, vectors):
    items = [Item(item_id, vectors[n], METADATA) for n, item_id in enumerate(ODD_IDS)]
    collection.add(items)
    for item in items:
        found = collection.get(item.id)
        assert found.id == item.id
        assert (found.embedding == item.embedding).all()  # bit by bit
        assert repr(found.metadata) == repr(dict(sorted(METADATA.items())))
        assert collection.metadata_of(item.id) == METADATA
    assert collection.add(items) == ["unchanged"] * len(items)
    nearest = collection.search(vectors[: len(items)], 1).matches
    assert [found[0].id for found in nearest] == ODD_IDS


def test_an_item_that_cannot_be_held_keeps_all_others_of_its_call_out(collection, vectors):
    for bad, said in (
        (Item("bad", np.zeros(DIMENSION)), "finite norm above 0"),
        (Item("bad", np.full(DIMENSION, np.nan)), "finite norm above 0"),
        (Item("bad", np.ones(DIMENSION + 1)), "shape"),
        (Item("", vectors[1]), "needs an id"),
        (Item("nul\0", vectors[1]), "none of them zero"),
        (Item("good", vectors[1]), "given once"),
        (Item("bad", vectors[1], {"n": float("nan")}), "number"),
    ):
        with pytest.raises(InvalidInput, match=said):
            collection.add([Item("good", vectors[0]), bad])
    assert len(collection) == 0


def test_items_are_those_of_one_moment(filled, vectors):
    blocks = filled.items(100)
    seen = next(blocks)
    filled.delete_all([f"i{n}" for n in range(400)])
    filled.add([Item("new", vectors[0])])
    for block in blocks:
        assert len(block) <= 100
        seen += block
    assert {item.id for item in seen} == {f"i{n}" for n in range(400)}
    assert all((item.embedding == vectors[item.metadata["n"]]).all() for item in seen)
    ids, take = filled.rows()
    assert ids == ["new"]
    assert (take(np.array([0])) == vectors[:1]).all()


def test_what_is_acknowledged_is_there_when_the_store_is_opened_again(store, opened, filled):
    filled.delete("i7")
    filled.update_metadata("i8", {"new": "field"})
    store.close()
    again = opened().get("c")
    described = again.describe()
    assert (described.items, described.fingerprint) == (399, FINGERPRINT)
    assert described.fields == ["n", "new", "odd"]
    assert again.metadata_of("i8") == {"new": "field"}
    assert again.metadata_of("i7") is None
    assert again.describe().writable


def test_writers_at_once_lose_nothing_and_write_nothing_twice(collection, vectors):
    def write(number):
        for n in range(number, 400, 8):
            collection.add([Item(f"i{n}", vectors[n]), Item("shared", vectors[n])])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))  # raises what a writer raised
    ids = [item.id for block in collection.items() for item in block]
    assert sorted(ids) == sorted([f"i{n}" for n in range(400)] + ["shared"])
    assert len(collection) == 401


def test_two_servers_are_both_right_or_one_of_them_is_refused(store, filled, opened, vectors):
    if filled.promises.writers == "one":
        with pytest.raises(Conflict, match="open"):
            opened()
        return
    other = opened().get("c")
    filled.add([Item("mine", vectors[0])])
    other.add([Item("theirs", vectors[1])])
    other.delete("i0")
    for one in (filled, other):
        assert len(one) == 401
        assert one.metadata_of("i0") is None
        assert {match.id for match in one.search(vectors[:2], 401).matches[0]} >= {"mine", "theirs"}
    assert filled.add([Item("theirs", vectors[1])]) == ["unchanged"]


def test_the_map_and_the_state_follow_every_change(filled, vectors):
    assert len(filled.layout().positions) == 400
    filled.delete("i0")
    filled.add([Item("new", vectors[0]), Item("i1", vectors[2], {"n": 1})])
    filled.update_metadata("i2", {"n": -2})
    plane = filled.layout()
    ids = [plane.state.ids[position] for position in plane.positions.tolist()]
    assert sorted(ids) == sorted({f"i{n}" for n in range(1, 400)} | {"new"})
    state = filled.state
    assert filled.state is state is plane.state
    assert (state.item(state.find("i1")).embedding == vectors[2]).all()
    assert state.item(state.find("i2")).metadata == {"n": -2}
    assert state.find("i0") is None


def test_an_id_that_an_earlier_version_took_is_still_read_and_deleted(
    collection, vectors, monkeypatch
):
    odd = ["line\nfeed", "x\u2028", "tab\t"]
    for item_id in odd:
        with pytest.raises(InvalidInput, match="control character"):
            collection.add([Item("plain", vectors[0]), Item(item_id, vectors[1])])
    assert len(collection) == 0
    monkeypatch.setattr("mlcd.collections.changes.check_new_id", lambda item_id: item_id)
    collection.add([Item(item_id, vectors[n]) for n, item_id in enumerate(odd)])
    monkeypatch.undo()
    assert [collection.get(item_id).id for item_id in odd] == odd
    assert collection.update_metadata(odd[0], {"n": 1}) == "updated"
    assert collection.delete_all(odd) == ["deleted"] * 3
