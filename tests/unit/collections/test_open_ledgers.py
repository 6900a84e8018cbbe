"""Many collections keep few ledgers open; whose they are is known all the same."""

import os
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from mlcd.artifacts.manifest import open_artifact
from mlcd.collections import open_ledgers
from mlcd.collections.collection import Collection
from mlcd.collections.folder import LEDGER
from mlcd.collections.generation import open_newest
from mlcd.collections.item import Item
from mlcd.collections.store import Collections, TooManyCollections
from mlcd.errors import Conflict, TooManyOpenFiles
from mlcd.indexes.faiss import FaissIndex
from tests.conftest import run_python
from tests.unit.collections.conftest import DIMENSION, FINGERPRINT

MANY = 40
NAMES = [f"c{n}" for n in range(MANY)]
OPENS = """
import sys
from pathlib import Path
from mlcd.collections.collection import Collection
from mlcd.errors import Conflict
try:
    Collection.open(Path(sys.argv[1]), read_only=sys.argv[2] == "read").close()
except Conflict as error:
    print(error)
"""
# Two collections in turn, of a store that keeps one ledger open.
WRITES = """
import os, sys
from pathlib import Path
import numpy as np
from mlcd.collections import open_ledgers
from mlcd.collections.item import Item
from mlcd.collections.store import Collections
open_ledgers.MOST_OPEN = 1
store = Collections.open(Path(sys.argv[1]))
number = 0
while True:
    name = f"c{number % 2}"
    store.get(name).add([Item(f"i{number}", np.eye(16)[number % 16])])
    os.write(1, f"{name} i{number}\\n".encode())
    number += 1
"""


def num_open(suffix=""):
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += str(path.readlink()).endswith(suffix)
    return found


@contextmanager
def limited(num):
    """Allows this many more descriptors than there are now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The numbers that are free are asked for: a thread that waits in accept() has one of its own
    # already, which /proc does not list.
    free = [os.dup(0) for _ in range(num + 1)]
    for number in free:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def opened_elsewhere(path, kind="write"):
    """Returns the output of another process that opens the collection."""
    return run_python(OPENS, path, kind).stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of many collections, each with an item and an index over it."""
    made = tmp_path_factory.mktemp("made") / "collections"
    with Collections.open(made) as store:
        for name in NAMES:
            collection, _ = store.create(name, fingerprint=FINGERPRINT, dimension=DIMENSION)
            collection.add([Item("a", np.eye(DIMENSION)[0])])
            collection.reindex()
    return made


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "collections")


@pytest.mark.parametrize("read_only", [False, True])
def test_many_collections_are_opened_searched_and_changed_with_few_descriptors(
    folder, monkeypatch, read_only
):
    monkeypatch.setattr(open_ledgers, "MOST_OPEN", 3)
    with limited(MANY + 30), Collections.open(folder, read_only=read_only) as store:
        for name in NAMES:
            assert store.get(name).search(np.eye(DIMENSION)[:1], 1).matches[0][0].id == "a"
            if not read_only:
                store.get(name).add([Item("b", np.eye(DIMENSION)[1])])
                store.get(name).update_metadata("a", {"n": 1})
                store.get(name).reindex()
            assert store.get(name).get("a").embedding == pytest.approx(np.eye(DIMENSION)[0])
        assert num_open(LEDGER) <= 3
        assert num_open("lock") == MANY
    with Collections.open(folder) as store:
        assert [len(one) for one in store.all().values()] == [1 if read_only else 2] * MANY


def test_many_threads_write_to_many_collections_that_rest_in_between(folder, monkeypatch):
    monkeypatch.setattr(open_ledgers, "MOST_OPEN", 1)
    with Collections.open(folder) as store:

        def write(number):
            collection = store.get(f"c{number % 7}")
            assert collection.add([Item(f"i{number}", np.eye(DIMENSION)[number % DIMENSION])]) == [
                "created"
            ]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(200)))
        assert num_open(LEDGER) <= 1
    with Collections.open(folder) as store:
        assert sum(len(one) for one in store.all().values()) == MANY + 200


def test_kill_loses_nothing_of_collections_that_rest_in_between(folder):
    with subprocess.Popen(
        [sys.executable, "-c", WRITES, folder], stdout=subprocess.PIPE
    ) as process:
        told = [process.stdout.readline() for _ in range(40)]
        process.kill()
        told += process.stdout.read().splitlines(keepends=True)
    with Collections.open(folder) as store:
        for name, item_id in (line.decode().split() for line in told):
            assert store.get(name).get(item_id).id == item_id


def test_another_process_finds_a_collection_taken_that_rests(folder):
    with Collections.open(folder) as store:
        assert store.get("c3").close_until_used()
        for kind in ("write", "read"):
            assert "another process has the collection c3 open" in opened_elsewhere(
                folder / "c3", kind
            )
        with pytest.raises(Conflict, match="another process has the collection c0 open"):
            Collections.open(folder)
        (folder.parent / "linked").symlink_to(folder / "c3")
        assert "another process" in opened_elsewhere(folder.parent / "linked")
        (folder / "c3").rename(folder / "other")
        assert "another process" in opened_elsewhere(folder / "other")
        (folder / "other").rename(folder / "c3")
        store.delete("c4")
        store.create("c4", fingerprint=FINGERPRINT, dimension=DIMENSION)
        assert "another process" in opened_elsewhere(folder / "c4")
        store.get("c3").add([Item("late", np.eye(DIMENSION)[2])])
    assert opened_elsewhere(folder / "c3") == ""


def test_stores_and_commands_that_only_read_share_it(folder):
    with (
        Collections.open(folder, read_only=True),
        Collections.open(folder, read_only=True) as store,
    ):
        assert opened_elsewhere(folder / "c3", "read") == ""
        assert "another process" in opened_elsewhere(folder / "c3")
        with pytest.raises(Conflict, match="another process"):
            Collections.open(folder)
        assert store.get("c3").search(np.eye(DIMENSION)[:1], 1).matches[0]


def test_a_ledger_that_was_replaced_while_it_rested_is_not_written(folder):
    with Collections.open(folder) as store:
        for name in ("c3", "c4"):
            assert store.get(name).close_until_used()
        store.get("c5").add([Item("b", np.eye(DIMENSION)[1])])
        assert store.get("c5").close_until_used()
        (folder / "c3" / LEDGER).unlink()
        (folder / "c4" / LEDGER).write_bytes((folder / "c5" / LEDGER).read_bytes())
        for name in ("c3", "c4"):
            with pytest.raises(
                Conflict, match=f"{name} was removed or replaced meanwhile"
            ) as caught:
                store.get(name).delete("a")
            assert str(folder) not in str(caught.value)
            assert store.get(name).search(np.eye(DIMENSION)[:1], 1).matches[0]
        assert not (folder / "c3" / LEDGER).exists()
        assert (folder / "c4" / LEDGER).read_bytes() == (folder / "c5" / LEDGER).read_bytes()


def test_where_no_descriptor_is_free_nothing_is_lost_and_it_goes_on_by_itself(folder):
    with Collections.open(folder) as store:
        collection = store.get("c3")
        assert collection.close_until_used()
        with limited(0):
            for refused in (
                lambda: collection.add([Item("b", np.eye(DIMENSION)[1])]),
                lambda: collection.delete("a"),
                lambda: store.create("new", fingerprint=FINGERPRINT, dimension=DIMENSION),
                lambda: store.delete("c4"),
            ):
                with pytest.raises(TooManyOpenFiles, match="ulimit -n"):
                    refused()
            assert len(collection.search(np.eye(DIMENSION)[:1], 9).matches[0]) == 1
        assert collection.add([Item("b", np.eye(DIMENSION)[1])]) == ["created"]
        assert store.create("new", fingerprint=FINGERPRINT, dimension=DIMENSION)[1]
        store.delete("c4")
        assert list(folder.glob(".*")) == []


def test_an_index_is_not_called_damaged_for_want_of_descriptors(folder):
    index = folder / "c3" / "index" / "00000001"
    with limited(0):
        for read in (
            lambda: open_artifact(index, verify_files=False),
            lambda: open_newest(index.parent, dimension=DIMENSION, fingerprint=FINGERPRINT),
            lambda: FaissIndex.read(index / "rows.npy"),
            lambda: Collection.open(folder / "c3"),
            lambda: Collections.open(folder),
        ):
            with pytest.raises((TooManyOpenFiles, OSError), match="open files"):
                read()
    with Collection.open(folder / "c3", background=False) as collection:
        assert (collection.describe().indexed, collection.describe().index_damaged) == (1, False)


def test_there_are_no_more_than_there_may_be_and_those_that_are_there_stay(folder):
    with Collections.open(folder, max_collections=10) as store:
        assert len(store.names()) == MANY
        assert not store.create("c3", fingerprint=FINGERPRINT, dimension=DIMENSION)[1]
        with pytest.raises(TooManyCollections, match="max_collections allows no more than 10"):
            store.create("new", fingerprint=FINGERPRINT, dimension=DIMENSION)
        for name in NAMES[9:]:
            store.delete(name)
        assert store.create("new", fingerprint=FINGERPRINT, dimension=DIMENSION)[1]
        with pytest.raises(TooManyCollections):
            store.create("newer", fingerprint=FINGERPRINT, dimension=DIMENSION)
    assert not (folder / "newer").exists()
