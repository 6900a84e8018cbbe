"""Collections that can only be read: searched by many processes, changed by none, whole also after
a crash.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.collections.store import Collections
from mlcd.errors import Conflict
from mlcd.types import unit_rows
from tests.conftest import run_python
from tests.unit.collections.conftest import DIMENSION, FINGERPRINT

VECTORS = unit_rows(np.random.default_rng(0).standard_normal((30, DIMENSION)))
CRASHES = """
import os, sys
from pathlib import Path
import numpy as np
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
collection = Collection.open(Path(sys.argv[1]), background=False)
collection.add([Item("late", np.eye(16, dtype=np.float32)[0])])
os._exit(9)
"""
READS = """
import mmap, os, sys  # mmap: nobody may not be let to the interpreter's own folders
from pathlib import Path
import numpy as np
from mlcd.collections.store import Collections
from mlcd.errors import Conflict
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
with Collections.open(Path(sys.argv[1])) as store:
    assert not store.writable
    collection = store.get("c")
    assert not collection.writable
    print(len(collection), collection.search(np.eye(16, dtype=np.float32)[:1], 1).matches[0][0].id)
    for change in (
        lambda: collection.delete("i0"),
        lambda: store.delete("c"),
        lambda: store.create("d", fingerprint="a" * 64, dimension=16),
    ):
        try:
            change()
        except Conflict as error:
            assert "for searches only" in str(error)
        else:
            raise SystemExit("it was changed")
"""


@pytest.fixture
def state():
    """A folder of one collection that everybody may enter, as pytest's own may not be."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "collections"
        with Collections.open(state) as store:
            collection, _ = store.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION)
            collection.add([Item(f"i{n}", vector) for n, vector in enumerate(VECTORS)])
            collection.reindex()
        Path(folder).chmod(0o755)
        yield state


def forbid_writing(state):
    for path in (state, *state.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)


def allow_writing(state):
    for path in (state, *state.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.parametrize("crashed", [False, True])
def test_a_folder_that_cannot_be_written_is_searched(state, crashed):
    """Run by somebody else where these tests are root's, whom no mode of a file stops."""
    if crashed:
        assert (
            subprocess.run([sys.executable, "-c", CRASHES, state / "c"], check=False).returncode
            == 9
        )
        assert (state / "c" / "items.sqlite-wal").stat().st_size
    before = {path: path.stat().st_mtime_ns for path in state.rglob("*")}
    forbid_writing(state)
    try:
        read = run_python(READS, state, check=False)
    finally:
        allow_writing(state)
    assert read.returncode == 0, read.stderr
    num_items, nearest = read.stdout.split()
    assert num_items == ("31" if crashed else "30")
    assert (nearest == "late") == crashed
    assert {path: path.stat().st_mtime_ns for path in state.rglob("*")}.keys() == before.keys()


def test_nothing_of_one_that_is_read_changes(state):
    with Collection.open(state / "c", read_only=True) as collection:
        for change in (
            lambda: collection.add([Item("x", VECTORS[0])]),
            lambda: collection.update_metadata("i0", {"n": 1}),
            lambda: collection.delete("i0"),
            collection.reindex,
        ):
            with pytest.raises(Conflict, match="for searches only"):
                change()
        assert not collection.describe().writable
        assert collection.get("i3").embedding == pytest.approx(VECTORS[3])


def test_what_was_put_there_meanwhile_is_found(state):
    with Collections.open(state) as store:
        for name in ("later", "half.partial", ".x.tmp"):
            Collection.create(state / name, fingerprint=FINGERPRINT, dimension=4).close()
        assert store.names() == ["c"]
        store.find_new()
        assert store.names() == ["c", "later"]
        Collection.create(state / "last", fingerprint=FINGERPRINT, dimension=4).close()
        _, made = store.create("last", fingerprint=FINGERPRINT, dimension=4)
        assert not made


def test_an_index_that_is_being_made_is_given_up_at_the_end(state):
    """The process may end now: what is half made is made anew, and nothing else is lost."""
    collection = Collection.open(state / "c", background=False)
    collection.close(finish=False)
    with pytest.raises(Conflict, match="closed"):
        collection.reindex()
    with Collection.open(state / "c", background=False) as again:
        assert (len(again), again.describe().generation) == (30, 1)
        again.reindex()
        assert again.describe().generation == 2
    assert [path.name for path in (state / "c" / "index").iterdir()] == ["00000002"]
