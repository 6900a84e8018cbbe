"""The promises of a collection to one caller."""

import resource
import shutil

import numpy as np
import pytest

from mlcd.collections import searcher as searcher_module
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.collections.store import Collections
from mlcd.errors import ArtifactInvalid, Conflict, InvalidInput, NotFound
from mlcd.indexes import gpu_copy, gpu_vectors, tuning
from mlcd.types import unit_rows
from tests.conftest import run_python
from tests.faiss_clones import let_clones_be_copies

DIMENSION = 16
FINGERPRINT = "a" * 64


def test_what_was_read_can_be_added_again(collection, vectors):
    collection.add([Item("a", 17.3 * vectors[0].astype(np.float64))])
    read = collection.get("a")
    assert np.linalg.norm(read.embedding) == pytest.approx(1, abs=1e-6)
    assert collection.add([read]) == ["unchanged"]


@pytest.mark.parametrize("indexed", [False, True])
def test_all_is_there_after_a_restart(tmp_path, vectors, indexed):
    items = [Item(f"i{n}", vector, {"n": n}) for n, vector in enumerate(vectors)]
    with Collection.create(
        tmp_path / "c", fingerprint=FINGERPRINT, dimension=DIMENSION
    ) as collection:
        collection.add(items[:300])
        if indexed:
            collection.reindex()
        collection.add(items[300:])
        collection.delete("i5")
        collection.update_metadata("i6", {"n": -6})
        collection.add([Item("i8", vectors[9])])
        before = collection.search(vectors, 400, exact=True)
    with Collection.open(tmp_path / "c") as collection:
        assert collection.describe().indexed == (300 if indexed else 0)
        after = collection.search(vectors, 400, exact=True)
        for left, right in zip(before.matches, after.matches, strict=True):
            assert {(match.id, str(match.metadata)) for match in left} == {
                (match.id, str(match.metadata)) for match in right
            }
            assert [m.similarity for m in left] == pytest.approx(
                [m.similarity for m in right], abs=1e-6
            )
        assert collection.get("i6").metadata == {"n": -6}
        collection.reindex()
        assert collection.describe().indexed == len(collection) == 399
        assert (collection.get("i8").embedding == vectors[9]).all()


def let_gpu_lack_room_for_vectors(monkeypatch):
    """Gives torch a GPU that has room for cells, but not for the vectors and their scores."""
    pytest.importorskip("torch")
    monkeypatch.setattr(gpu_copy, "find_gpu", lambda: "cpu")
    monkeypatch.setattr(gpu_copy, "free_bytes", lambda: gpu_vectors._SCORE_BYTES)


def let_gpu_hold_graphs(monkeypatch):
    """Gives torch a GPU that has room for all, and lets few vectors have a graph."""
    gpu_graph = pytest.importorskip("mlcd.indexes.gpu_graph")
    monkeypatch.setattr(gpu_copy, "find_gpu", lambda: "cpu")
    monkeypatch.setattr(gpu_copy, "free_bytes", lambda: 1 << 40)
    monkeypatch.setattr(gpu_vectors, "GRAPH_LEAST_BYTES", 1)
    monkeypatch.setattr(gpu_graph, "_LEAST_SPEEDUP", 0)


@pytest.mark.parametrize(
    ("kind", "by", "let_torch_have_a_gpu"),
    [
        ("hnsw", "cpu", None),
        ("ivf-sq8", "cpu", None),
        ("ivf-sq8", "gpu", None),
        ("ivf-sq8", "gpu", let_gpu_lack_room_for_vectors),
        ("cagra", "gpu", let_gpu_hold_graphs),
    ],
)
def test_an_approximate_index_keeps_the_promises(
    tmp_path, monkeypatch, kind, by, let_torch_have_a_gpu
):
    """Recall at its target, min(top, matches) whatever the filter, exact on request, scores of
    float32.
    """
    if by == "gpu":
        let_clones_be_copies(monkeypatch)
    if let_torch_have_a_gpu is not None:
        let_torch_have_a_gpu(monkeypatch)
    monkeypatch.setattr(tuning, "FLAT_ROWS", 1000)
    monkeypatch.setattr(tuning, "HNSW_ROWS", 10**6 if kind == "hnsw" else 1000)
    monkeypatch.setattr(searcher_module, "_SCAN_AT_MOST", 10)
    generator = np.random.default_rng(0)
    vectors = unit_rows(generator.standard_normal((6000, DIMENSION)))
    path = tmp_path / "c"
    with Collection.create(
        path, fingerprint=FINGERPRINT, dimension=DIMENSION, recall=0.95
    ) as collection:
        collection.add([Item(f"i{n}", vector, {"n": n}) for n, vector in enumerate(vectors)])
        collection.reindex()
    with Collection.open(path) as collection:
        collection.delete("i11")
        collection.search(vectors[:1], 1)
        described = collection.describe()
        assert described.kind == kind
        assert described.recall["low"] >= 0.95
        queries = unit_rows(generator.standard_normal((200, DIMENSION)))
        for share in (1.0, 0.5, 0.1, 0.01, 0.001):
            condition = {"field": "n", "lt": int(6000 * share)}
            found = collection.search(queries, 10, filter=condition)
            truth = collection.search(queries, 10, filter=condition, exact=True)
            assert truth.exact
            hits = 0
            for near, true in zip(found.matches, truth.matches, strict=True):
                assert (
                    len(near)
                    == len({match.id for match in near})
                    == len(true)
                    == min(10, truth.matching)
                )
                assert all(int(match.id[1:]) < 6000 * share for match in near)
                hits += len({match.id for match in near} & {match.id for match in true})
            assert hits / sum(map(len, truth.matches)) >= 0.9
        found = collection.search(queries, 10)
        assert (found.exact, found.by) == (False, by)
        for query, matches in zip(queries, collection.search(queries, 3).matches, strict=True):
            for match in matches:
                cosine = float(vectors[int(match.id[1:])].astype(np.float64) @ query)
                assert match.similarity == pytest.approx(cosine, abs=1e-6)


def test_where_an_index_finds_too_few_everything_is_compared(tmp_path, monkeypatch):
    """The items that pass the filter are not in the query's own cells."""
    monkeypatch.setattr(tuning, "FLAT_ROWS", 1000)
    monkeypatch.setattr(tuning, "HNSW_ROWS", 1000)
    monkeypatch.setattr(searcher_module, "_SCAN_AT_MOST", 10)
    generator = np.random.default_rng(0)
    sides = np.repeat([1.0, -1.0], 3000)
    axis = np.eye(DIMENSION)[0]
    vectors = unit_rows(4 * sides[:, None] * axis + generator.standard_normal((6000, DIMENSION)))
    path = tmp_path / "c"
    with Collection.create(
        path, fingerprint=FINGERPRINT, dimension=DIMENSION, recall=0.9
    ) as collection:
        collection.add(
            [Item(f"i{n}", vector, {"far": n >= 3000}) for n, vector in enumerate(vectors)]
        )
        collection.reindex()
        assert collection.describe().kind == "ivf-sq8"
        far = {"field": "far", "eq": True}
        found = collection.search(vectors[:20], 10, filter=far)
        truth = collection.search(vectors[:20], 10, filter=far, exact=True)
        assert [len(matches) for matches in found.matches] == [10] * 20
        for near, true in zip(found.matches, truth.matches, strict=True):
            assert [match.similarity for match in near] == pytest.approx(
                [m.similarity for m in true], abs=1e-6
            )


def bad_items():
    good = np.eye(DIMENSION, dtype=np.float32)[0]
    yield "finite norm above 0", Item("i", good + np.inf)
    yield r"'i' must have shape \[16\], got \[8\]", Item("i", good[:8])
    yield r"got \[1, 16\]", Item("i", good[None])
    yield "needs an id", Item(7, good)
    yield "at most 1024 bytes", Item("i" * 1025, good)
    for dots in (".", ".."):
        yield "another id", Item(dots, good)
    for control in "\r\x7f\x85":
        yield "control character", Item(f"a{control}b", good)
    yield "not valid Unicode", Item("\ud800", good)
    yield "at most 16384 bytes", Item("i", good, {"x": "y" * 20_000})
    yield "at most 128 fields, got 129", Item("i", good, dict.fromkeys(map(str, range(129))))
    yield "strings of 1 to 128 bytes", Item("i", good, {"": 1})
    yield r"within ±2\^53", Item("i", good, {"x": 2**60})
    yield "JSON value, nested", Item("i", good, {"x": object()})
    yield "JSON value, nested", Item("i", good, {"x": [[[[[[[[[1]]]]]]]]]})
    yield "must be a JSON object, got a list", Item("i", good, [1])


@pytest.mark.parametrize(("message", "item"), list(bad_items()))
def test_an_item_that_cannot_be_held_is_named_and_none_of_its_request_is(
    collection, vectors, message, item
):
    with pytest.raises(InvalidInput, match=message) as raised:
        collection.add([Item("good", vectors[0]), item])
    assert len(str(raised.value)) < 400
    assert len(collection) == 0


def test_after_the_end_nothing_is_written(filled, vectors):
    filled.close()
    with pytest.raises(Conflict, match="closed"):
        filled.delete("i1")
    with Collection.open(filled.path) as again:
        assert len(again) == 400


def test_the_store_creates_lists_and_deletes(tmp_path, vectors):
    with Collections.open(tmp_path / "s") as store:
        made, new = store.create("photos", fingerprint=FINGERPRINT, dimension=DIMENSION)
        assert new
        made.add([Item("a", vectors[0])])
        assert store.create("photos", fingerprint=FINGERPRINT, dimension=DIMENSION) == (made, False)
        with pytest.raises(Conflict, match="dimension 16 by the model aaa"):
            store.create("photos", fingerprint="b" * 64, dimension=DIMENSION)
        store.create("other", fingerprint=FINGERPRINT, dimension=4)
    with Collections.open(tmp_path / "s") as store:
        assert store.names() == ["other", "photos"]
        assert len(store.get("photos")) == 1
        store.delete("photos")
        with pytest.raises(NotFound):
            store.get("photos")
        assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["other"]
        assert store.create("photos", fingerprint="b" * 64, dimension=4)[0].dimension == 4
    (tmp_path / "s" / ".photos.1.deleted").mkdir()
    (tmp_path / "s" / ".photos.1.2.tmp").mkdir()
    with Collections.open(tmp_path / "s") as store:
        assert len(store.get("photos")) == 0
        assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [
            "other",
            "photos",
        ]


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/etc",
        ".hidden",
        "a" * 129,
        "a\0",
        "a b",
        "é",
        "a.partial",
        None,
    ],
)
def test_a_name_that_is_a_path_is_refused(tmp_path, name):
    with Collections.open(tmp_path / "s") as store:
        for call in (
            store.get,
            store.delete,
            lambda n: store.create(n, fingerprint=FINGERPRINT, dimension=4),
        ):
            with pytest.raises(InvalidInput, match="cannot name a collection"):
                call(name)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert [path.name for path in (tmp_path / "s").iterdir()] == []


def test_a_damaged_ledger_is_never_served(filled, vectors):
    filled.close()
    ledger = filled.path / "items.sqlite"
    whole = ledger.read_bytes()
    stored = vectors[9].tobytes()
    place = whole.index(stored)
    ledger.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(ArtifactInvalid, match="damaged"):
        Collection.open(filled.path)
    place = whole.index(b'{"n":9,')
    ledger.write_bytes(whole[:place] + b'{"n":8,' + whole[place + 7 :])
    with pytest.raises(ArtifactInvalid, match="damaged"):
        Collection.open(filled.path)
    ledger.write_bytes(b"nothing" * 1000)
    with pytest.raises(ArtifactInvalid, match=r"damaged|not a"):
        Collection.open(filled.path)
    shutil.rmtree(filled.path)
    with pytest.raises(NotFound):
        Collection.open(filled.path)


FILLING = """
import sys
import numpy as np
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.errors import Unavailable
from pathlib import Path

rng = np.random.default_rng(0)
with Collection.create(Path(sys.argv[1]), fingerprint="a" * 64, dimension=256) as collection:
    kept = 0
    try:
        for number in range(100_000):
            collection.add([Item(f"i{number}", rng.standard_normal(256))])
            kept += 1
    except Unavailable as error:
        assert "free space" in str(error), error
    assert len(collection) == kept
    assert len(collection.search(rng.standard_normal((1, 256)), 10).matches[0]) == 10
print(kept)
"""


def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))

    result = run_python(FILLING, tmp_path / "c", check=False, preexec_fn=limit, timeout=120)
    assert result.returncode == 0, result.stderr
    kept = int(result.stdout)
    assert 30 < kept < 10_000
    with Collection.open(tmp_path / "c") as collection:
        assert len(collection) == kept
        assert collection.add([Item("more", np.ones(256))]) == ["created"]


INDEXING = """
import resource
import sys
import numpy as np
from pathlib import Path
from mlcd.collections import upkeep
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.errors import Unavailable

def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

upkeep._UNINDEXED_ROWS = 50
rows = np.random.default_rng(0).standard_normal((100, 256))
path = Path(sys.argv[1])
Collection.create(path, fingerprint="a" * 64, dimension=256).close()
with Collection.open(path, background=False) as collection:
    collection.add([Item(f"i{n}", row) for n, row in enumerate(rows)])
    limit(50_000)
    try:
        collection.reindex()
        raise SystemExit("no error")
    except Unavailable as error:
        assert "disk is full" in str(error), error
    nearest = [found[0].id for found in collection.search(rows, 1).matches]
    assert nearest == [f"i{n}" for n in range(100)]
with Collection.open(path) as collection:
    collection._upkeep.join()
    assert "disk is full" in collection.describe().indexing_error
    limit(10_000_000)
    collection.reindex()
    assert collection.describe().indexing_error is None
    assert collection.describe().indexed == 100
"""


def test_an_index_that_finds_no_space_disturbs_no_search(tmp_path):
    result = run_python(INDEXING, tmp_path / "c", check=False, timeout=120)
    assert result.returncode == 0, result.stderr


def test_a_transaction_waits_for_the_disk(collection):
    """Kill -9 cannot show it and a power cut is no test: the settings that SQLite's own tests of
    power cuts are for.
    """
    ask = collection._ledger._connection.execute
    assert ask("PRAGMA journal_mode").fetchone() == ("wal",)
    assert ask("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_where_memory_and_disk_may_differ_nothing_more_is_written(filled, vectors, monkeypatch):
    def run_out(effects):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(filled._writes.growth, "apply", run_out)
        with pytest.raises(MemoryError):
            filled.delete("i1")
    for _ in range(2):
        with pytest.raises(Conflict, match="open it again"):
            filled.add([Item("new", vectors[0])])
    assert len(filled.search(vectors[:1], 400).matches[0]) == 400
    filled.close()
    with Collection.open(filled.path) as again:
        assert len(again) == 399
