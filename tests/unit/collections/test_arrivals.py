"""Collections that are put into an open store's folder: opened when they are asked for, and never
twice.
"""

import threading

import numpy as np
import pytest

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.collections.store import Collections
from mlcd.errors import Conflict

FINGERPRINT = "f" * 64


@pytest.fixture
def store(tmp_path):
    with Collections.open(tmp_path / "collections") as opened:
        yield opened


@pytest.fixture
def arrive(tmp_path):
    """Built elsewhere and renamed into the folder, as a job does it."""

    def put(name, folder=None):
        with Collection.create(
            tmp_path / "built", fingerprint=FINGERPRINT, dimension=3, background=False
        ) as collection:
            collection.add([Item("a", np.array([1.0, 0, 0]))])
        return (tmp_path / "built").rename((folder or tmp_path / "collections") / name)

    return put


def test_one_that_arrives_is_opened_by_name_and_with_all(store, arrive):
    assert not store.has_arrived("a")
    store.open_arrived("a")
    assert store.find("a") is None
    for name in ("a", "b", "c"):
        arrive(name)
    assert store.find_arrivals() == ["a", "b", "c"]
    store.open_arrived("a")
    assert len(store.get("a")) == 1
    assert (store.find_arrivals(), store.names()) == (["b", "c"], ["a"])
    store.open_all_arrived()
    assert (store.find_arrivals(), store.names()) == ([], ["a", "b", "c"])
    store.get("b").add([Item("b", np.array([0.0, 1, 0]))])


def test_what_is_no_name_of_a_collection_is_never_looked_at(store, arrive, tmp_path):
    outside = arrive("outside", tmp_path)
    for name in (
        "../outside",
        str(outside),
        "",
        ".",
        "..",
        "a.partial",
        ".hidden",
        "x" * 300,
        "a\0b",
        "é",
    ):
        assert not store.has_arrived(name)
        store.open_arrived(name)
    for name in ("a.partial", ".hidden", "é"):
        arrive(name)
    assert store.find_arrivals() == []


def test_ten_that_ask_at_once_open_it_once(store, arrive, monkeypatch):
    arrive("a")
    opened, together = [], threading.Barrier(10, timeout=30)
    opening = Collection.open

    def counted(path, **options):
        opened.append(path)
        return opening(path, **options)

    monkeypatch.setattr(Collection, "open", counted)

    def ask():
        together.wait()
        store.open_arrived("a")

    threads = [threading.Thread(target=ask) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1
    assert len(store.get("a")) == 1


def test_one_that_another_process_has_open_is_refused_and_tried_again_later(store, arrive):
    with Collection.open(arrive("a"), background=False):
        with pytest.raises(Conflict, match="exists but cannot be opened"):
            store.open_arrived("a")
        store.open_all_arrived()
        assert store.names() == []
    with pytest.raises(Conflict, match="exists but cannot be opened"):
        store.open_arrived("a")  # within the pause
    store._refused_until_s["a"] = 0.0  # it is over
    store.open_arrived("a")
    assert len(store.get("a")) == 1


def test_a_damaged_one_is_read_once_in_a_while_and_stops_no_other(
    store, arrive, monkeypatch, caplog
):
    path = arrive("a")
    (path / "items.sqlite").write_bytes(b"no ledger" * 1000)
    arrive("b")
    tries = []
    opening = Collection.open
    monkeypatch.setattr(
        Collection, "open", lambda path, **options: tries.append(path) or opening(path, **options)
    )
    for _ in range(5):
        with pytest.raises(Conflict) as caught:
            store.open_arrived("a")
        assert str(path) not in str(caught.value)
    assert tries == [path]
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the collection a cannot be opened"
    ]
    store.open_all_arrived()
    assert store.names() == ["b"]


def test_nothing_is_opened_after_the_end(tmp_path, arrive):
    store = Collections.open(tmp_path / "collections")
    arrive("a")
    store.close()
    store.open_arrived("a")
    assert store.names() == []
    Collection.open(tmp_path / "collections" / "a", background=False).close()


def test_stores_that_only_read_share_it(tmp_path, arrive):
    (tmp_path / "collections").mkdir()
    stores = [Collections.open(tmp_path / "collections", read_only=True) for _ in range(2)]
    arrive("a")
    for store in stores:
        store.open_arrived("a")
        assert not store.get("a").writable
    for store in stores:
        store.close()
