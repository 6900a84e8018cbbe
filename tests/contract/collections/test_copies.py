"""A collection that goes from a folder into any store and back stays what it is, and a copy that
was stopped goes on.
"""

import contextlib

import numpy as np
import pytest

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.collections.places import open_place
from mlcd.errors import ConfigInvalid
from mlcd.pipelines.fill_store import copy_items, is_copy
from mlcd.progress import Reporter
from tests.contract.collections.conftest import DIMENSION, FINGERPRINT

SILENT = Reporter("silent")


@pytest.fixture
def folder(tmp_path, vectors):
    path = tmp_path / "given"
    with Collection.create(path, fingerprint=FINGERPRINT, dimension=DIMENSION) as collection:
        collection.add([Item(f"i{n}", row, {"n": n}) for n, row in enumerate(vectors)])
    return path


class Stopped(Exception):
    pass


def all_items(collection):
    return {
        item.id: (item.embedding.tobytes(), item.metadata)
        for block in collection.items()
        for item in block
    }


def test_a_stopped_copy_goes_on_and_comes_back_the_same(
    folder, place, tmp_path, vectors, monkeypatch
):
    out = f"{place}/copied"
    assert is_copy(str(folder), out)
    monkeypatch.setattr("mlcd.pipelines.fill_store._BLOCK_ROWS", 100)
    meters = []

    def stop(meter, num):
        meters.append(num)
        if len(meters) == 2:
            raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr("mlcd.progress._SilentMeter.advance", stop)
        with pytest.raises(Stopped):
            copy_items(str(folder), out, SILENT, recall=None)
    described = copy_items(str(folder), out, SILENT, recall=None)
    assert (described.items, described.fingerprint) == (400, FINGERPRINT)
    with contextlib.closing(open_place(place)) as store:
        store.get("copied").delete("i7")
        store.get("copied").add([Item("more", np.ones(DIMENSION))])
    copy_items(out, str(tmp_path / "back"), SILENT, recall=None)
    with Collection.open(folder) as given, Collection.open(tmp_path / "back") as back:
        wanted = all_items(given)
        del wanted["i7"]
        found = all_items(back)
        del found["more"]
        assert found == wanted


def test_embeddings_of_another_model_stay_out(folder, place, tmp_path):
    out = f"{place}/copied"
    copy_items(str(folder), out, SILENT, recall=0.9)
    other = tmp_path / "other"
    Collection.create(other, fingerprint="b" * 64, dimension=DIMENSION).close()
    with pytest.raises(Exception, match="another"):
        copy_items(str(other), out, SILENT, recall=None)
    with pytest.raises(Exception, match="recall"):
        copy_items(str(folder), out, SILENT, recall=0.95)


def test_a_command_line_holds_no_password(folder):
    for out, said in (
        ("postgresql://a:secret@h/d/n", "must not contain a password"),
        ("postgresql://h/d", "must name a collection"),
        ("postgresql://h", "must name a collection"),
    ):
        with pytest.raises(ConfigInvalid, match=said) as caught:
            copy_items(str(folder), out, SILENT, recall=None)
        assert "secret" not in str(caught.value)
