"""Damaged collections: never opened without a word, never a traceback, and the others are served."""

import logging
import os
import random
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.collections.store import Collections, CollectionUnusable
from mlcd.errors import ArtifactInvalid, Conflict, MlcdError
from mlcd.images.thumbnail import Thumbnail
from tests.unit.collections.conftest import DIMENSION, FINGERPRINT

NUM = 60


@pytest.fixture
def state(tmp_path, vectors):
    """Two collections with an index, thumbnails, and items beside and gone from the index."""
    with Collections.open(tmp_path / "state") as store:
        for name in ("a", "b"):
            collection, _ = store.create(name, fingerprint=FINGERPRINT, dimension=DIMENSION)
            items = [
                Item(f"i{n}", vectors[n], {"n": n}, Thumbnail(f"picture {n}".encode() * 9))
                for n in range(NUM)
            ]
            collection.add(items[:40])
            collection.reindex()
            collection.add(items[40:])
            collection.delete("i3")
            collection.update_metadata("i5", {"n": -5})
    return tmp_path / "state"


def ledger(path, *statements):
    with closing(sqlite3.connect(path / "items.sqlite")) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def content(collection):
    """All that clients can read, but for thumbnails."""
    items = {
        item.id: (item.metadata, item.embedding.tobytes())
        for block in collection.items()
        for item in block
    }
    about = collection.describe()
    query = np.ones((1, DIMENSION), dtype=np.float32)
    return (
        items,
        (about.items, about.dimension, about.fingerprint, about.recall_target),
        str(collection.search(query, 5)),
    )


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DELETE FROM items WHERE row > 50", "damaged"),  # their vectors stay
        ("DELETE FROM vectors WHERE row = 7", "damaged"),
        (
            "UPDATE vectors SET checksum = checksum + 1 WHERE row = 7",
            "do not match its seal",
        ),
        ("UPDATE items SET row = 1000 WHERE row = 60", "damaged"),
        ("UPDATE facts SET value = '17' WHERE name = 'dimension'", "damaged"),
        ("UPDATE facts SET value = '0.5' WHERE name = 'recall'", "damaged"),
        ("UPDATE facts SET value = '{' WHERE name = 'source'", "damaged"),
        ("DELETE FROM facts WHERE name = 'seal'", "damaged"),
        ("UPDATE facts SET value = '[]' WHERE name = 'seal'", "damaged"),
        ("UPDATE sqlite_sequence SET seq = 3", "do not match its seal"),
        ("PRAGMA user_version = 1", "damaged"),
        ("PRAGMA user_version = 9", "upgrade mlcd"),
        ("UPDATE items SET id = x'00ff' WHERE row = 9", "damaged"),
        ("DROP TABLE vectors", "damaged"),
    ],
)
def test_a_ledger_that_holds_something_else_than_it_states_is_not_opened(state, statement, message):
    ledger(state / "a", statement)
    for read_only in (False, True):
        with pytest.raises(ArtifactInvalid, match=message):
            Collection.open(state / "a", read_only=read_only)


def test_a_ledger_that_lacks_rows_says_how_many_and_the_remedy(state):
    ledger(state / "a", *(f"DELETE FROM {table} WHERE row > 50" for table in ("items", "vectors")))
    with pytest.raises(ArtifactInvalid) as caught:
        Collection.open(state / "a")
    assert str(caught.value) == (
        f"{state / 'a'}: its ledger must contain 59 items, got 49: a copy made while it was written?"
        " restore it with `mlcd restore`"
    )


def test_a_copy_of_parts_of_different_moments_is_not_opened(tmp_path, vectors):
    """The file as it was, and a log that has begun anew since."""
    live, copy = tmp_path / "live", tmp_path / "copy"
    with Collection.create(
        live, fingerprint=FINGERPRINT, dimension=DIMENSION, background=False
    ) as collection:
        collection.add([Item(f"a{n}", vectors[n]) for n in range(100)])
        collection._ledger._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        copy.mkdir()
        shutil.copy(live / "items.sqlite", copy)
        collection.add([Item(f"b{n}", vectors[n]) for n in range(100, 300)])
        collection._ledger._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        collection.add([Item(f"c{n}", vectors[n]) for n in range(10)])
        shutil.copy(live / "items.sqlite-wal", copy)
    (copy / "lock").touch()
    with pytest.raises(ArtifactInvalid, match=r"restore it with `mlcd restore`"):
        Collection.open(copy)


def test_a_seal_goes_along_with_every_change_and_with_changes_that_fail(filled, vectors):
    filled.add([Item("i3", vectors[4], {"n": 3}), Item("i5", vectors[5], {"other": 1})])
    filled.update_metadata("i7", {"n": 70})
    filled.delete_all(["i1", "i2", "nobody"])
    with pytest.raises(MlcdError):
        filled.update_metadata("nobody", {})
    filled.take_source({"kind": "embeddings", "digest": "d" * 64})
    expected = content(filled)
    filled.close()
    for read_only in (True, False):
        with Collection.open(filled.path, read_only=read_only) as again:
            assert content(again) == expected


def test_a_ledger_from_before_the_seal_gets_one_when_it_may_be_written(state):
    ledger(state / "a", "DELETE FROM facts WHERE name = 'seal'", "PRAGMA user_version = 1")
    for read_only, version in ((True, 1), (False, 2), (True, 2)):
        with Collection.open(state / "a", read_only=read_only) as collection:
            assert len(collection) == NUM - 1
        with closing(sqlite3.connect(state / "a" / "items.sqlite")) as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (version,)
    ledger(state / "a", *(f"DELETE FROM {table} WHERE row > 50" for table in ("items", "vectors")))
    with pytest.raises(ArtifactInvalid, match="must contain 59 items"):
        Collection.open(state / "a")


def _flip(path, place, bit):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_no_flipped_bit_ends_in_a_traceback_or_in_a_wrong_answer(state, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    with Collections.open(state) as store:
        whole = content(store.get("a"))
    files = [
        path
        for path in sorted((state / "a").rglob("*"))
        if path.is_file() and path.suffix != ".npz" and path.stat().st_size
    ]
    drawn, opened = random.Random(50), 0
    for number in range(60):
        copy = shutil.copytree(state, tmp_path / f"copy{number}")
        path = copy / files[number % len(files)].relative_to(state)
        data = path.read_bytes()
        place = drawn.choice([at for at in range(len(data)) if data[at]])
        _flip(path, place, drawn.randrange(8))
        with Collections.open(copy) as store:
            assert len(store.get("b")) == NUM - 1
            if "a" in store.names():
                opened += 1
                assert content(store.get("a")) == whole, (path, place)
                for n in range(NUM):
                    picture = store.get("a").thumbnail(f"i{n}") if n != 3 else None
                    assert picture is None or picture.data == f"picture {n}".encode() * 9
            else:
                assert store.unusable().keys() == {"a"}
        shutil.rmtree(copy)
    assert 0 < opened < 60


@pytest.mark.parametrize("part", ["items.sqlite", "lock"])
def test_the_others_are_served_without_a_collection_that_lacks_a_part(state, part, caplog):
    (state / "a" / part).unlink()
    with Collections.open(state) as store:
        assert store.names() == ["b"]
        assert f"a/{part} is missing" in store.unusable()["a"]
        assert str(state) not in store.unusable()["a"]
        for _ in range(3):
            with pytest.raises(CollectionUnusable, match=rf"a/{part} is missing"):
                store.open_arrived("a")
        assert sum("cannot be opened" in record.message for record in caplog.records) == 1
        with pytest.raises(Conflict):
            store.create("a", fingerprint=FINGERPRINT, dimension=DIMENSION)
        assert not (state / "a" / part).exists()


def test_a_collection_that_was_mended_is_opened_without_a_restart(state):
    (state / "a" / "lock").unlink()
    with Collections.open(state) as store:
        (state / "a" / "lock").touch()
        store._refused_until_s["a"] = 0.0  # the pause is over
        store.open_all_arrived()
        assert (store.names(), store.unusable()) == (["a", "b"], {})


def test_what_cannot_be_a_collection_stops_no_other(state):
    (state / "two words").mkdir()
    (state / "two words" / "lock").touch()
    os.mkfifo(state / "pipe")
    (state / "d" / "items.sqlite").mkdir(parents=True)
    (state / "file").write_text("x")
    with Collections.open(state) as store:
        assert store.names() == ["a", "b"]
        assert store.unusable().keys() == {"d", "two words"}


def test_a_deleted_one_is_not_unusable_any_more(state):
    (state / "a" / "lock").unlink()
    with Collections.open(state) as store:
        shutil.rmtree(state / "a")
        assert store.unusable() == {}
        _, made = store.create("a", fingerprint=FINGERPRINT, dimension=DIMENSION)
        assert made
