"""CAGRA's graph beside a collection's vectors, with torch and a graph of faiss on the CPU in the
GPU's role, and on a real one where faiss-gpu-cuvs finds it.
"""

import logging

import numpy as np
import pytest

from mlcd.indexes import gpu_copy, gpu_vectors
from mlcd.indexes.gpu_vectors import GpuVectors
from mlcd.indexes.scan import scan
from mlcd.types import unit_rows
from tests.faiss_clones import let_clones_be_copies

pytest.importorskip("torch")
device_rows = pytest.importorskip("mlcd.indexes.device_rows")
faiss_module = pytest.importorskip("mlcd.indexes.faiss")
gpu_graph = pytest.importorskip("mlcd.indexes.gpu_graph")
NUM, DIMENSION, NUM_ADDED = 6000, 16, 500
NUM_LINKED = NUM - NUM // 5
TARGET = 0.95
REAL = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not faiss_module.searches_on_gpus(), reason="needs faiss-gpu-cuvs and a GPU"
        ),
    ],
)


@pytest.fixture(params=["cpu", REAL], autouse=True)
def device(request, monkeypatch):
    monkeypatch.setattr(gpu_copy, "find_gpu", lambda: request.param)
    monkeypatch.setattr(gpu_copy, "_PATIENCE_S", 60)
    monkeypatch.setattr(gpu_vectors, "LEAST_ROWS", 1)
    monkeypatch.setattr(gpu_vectors, "GRAPH_LEAST_BYTES", 1)
    monkeypatch.setattr(gpu_graph, "_LEAST_SPEEDUP", 0)
    if request.param == "cpu":
        let_clones_be_copies(monkeypatch)
        monkeypatch.setattr(device_rows, "free_bytes", lambda: 1 << 40)
    return request.param


@pytest.fixture(scope="module")
def all_rows():
    return unit_rows(np.random.default_rng(0).standard_normal((NUM + NUM_ADDED, DIMENSION)))


@pytest.fixture(scope="module")
def queries():
    return unit_rows(np.random.default_rng(1).standard_normal((200, DIMENSION)))


@pytest.fixture
def gpu():
    return GpuVectors()


@pytest.fixture
def search(gpu, all_rows, queries):
    """Searches all rows, of which the last were added to the generation's."""

    def run(top, allowed=None, queries=queries):
        indexed, added = all_rows[:NUM], all_rows[NUM:]
        return gpu.search_graph(queries, top, indexed, added, allowed, target=TARGET)

    return run


def assert_near(neighbors, queries, rows, top, allowed=None, recall=TARGET - 0.03):
    """At most some neighbors are others, which are farther; each is there once, with its score."""
    truth = scan(
        queries, rows, top, allowed_rows=None if allowed is None else np.flatnonzero(allowed)
    )
    assert (neighbors.ids.shape, neighbors.ids.dtype) == (truth.ids.shape, np.int64)
    assert ((neighbors.ids < 0) == (truth.ids < 0)).all()
    found = neighbors.ids >= 0
    own = np.einsum("qkd,qd->qk", rows[neighbors.ids], queries)
    assert own[found] == pytest.approx(neighbors.scores[found], abs=1e-6)
    assert (np.diff(neighbors.scores, axis=1) <= 0).all()
    assert all(len(set(ids)) == top for ids in neighbors.ids)
    assert allowed is None or allowed[neighbors.ids].all()
    shares = [np.isin(*ids).mean() for ids in zip(neighbors.ids, truth.ids, strict=True)]
    assert np.mean(shares) >= recall


def test_the_effort_is_the_least_that_reaches_the_target_and_is_audited(gpu, search, queries):
    assert gpu.graph_choice is None
    assert search(10) is not None
    effort, recall = gpu.graph_choice
    assert effort in faiss_module.CAGRA_EFFORTS
    assert recall.low >= recall.target == TARGET
    assert (recall.queries, recall.rows) == (NUM // 10, NUM_LINKED)


@pytest.mark.parametrize("top", [1, 10, 50])
def test_it_finds_what_a_scan_finds(search, all_rows, queries, top):
    assert_near(search(top), queries, all_rows, top)


def test_rows_outside_of_the_graph_are_always_found(search, all_rows):
    outside = all_rows[NUM_LINKED:]
    found = search(1, queries=outside)
    assert found.ids[:, 0].tolist() == list(range(NUM_LINKED, NUM + NUM_ADDED))


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_a_filter_is_kept_with_the_same_recall(search, all_rows, queries, share):
    allowed = np.random.default_rng(2).random(len(all_rows)) < share
    assert_near(search(10, allowed), queries, all_rows, 10, allowed)


def test_the_fewer_rows_a_filter_leaves_the_more_effort_it_gets(gpu, search, all_rows, monkeypatch):
    assert search(10) is not None
    own, efforts = gpu.graph_choice[0], []
    honest = faiss_module.Cagra.search

    def record(self, queries, top, effort, allowed):
        efforts.append(effort)
        return honest(self, queries, top, effort, allowed)

    monkeypatch.setattr(faiss_module.Cagra, "search", record)
    for num_allowed in (NUM_LINKED, NUM_LINKED * 2 // 3, NUM_LINKED // 2):
        search(10, np.arange(len(all_rows)) < num_allowed)
    assert efforts == [own, 1.5 * own, 2 * own]


def test_where_a_graph_would_find_too_little_a_scan_searches(search, all_rows):
    assert search(10) is not None
    assert search(161) is None, "an effort of 32 for 10 neighbors is more than 512 for 161"
    few = np.arange(len(all_rows)) < NUM_LINKED // 20
    assert search(10, few) is None
    assert search(10, np.zeros(len(all_rows), dtype=bool)) is None
    assert search(10, queries=all_rows[:0]) is None


def test_a_query_that_is_answered_twice_the_same_is_scanned(
    gpu, search, queries, all_rows, monkeypatch, device
):
    if device == "cuda":
        pytest.skip("replaces the stand-in")
    assert search(10) is not None
    index = gpu._copy.made.graph.made._cagra._index
    honest, scan_rows = index.search, device_rows.DeviceRows.search
    scanned = []

    def repeat_a_row(*given, **options):
        scores, ids = honest(*given, **options)
        ids[3, 1:], scores[3, 1:] = ids[3, 0], scores[3, 0]
        return scores, ids

    def record(self, queries, *given, **options):
        scanned.append(len(queries))
        return scan_rows(self, queries, *given, **options)

    monkeypatch.setattr(index, "search", repeat_a_row)
    monkeypatch.setattr(device_rows.DeviceRows, "search", record)
    found = search(10)
    assert found.ids[3].tolist() == scan(queries[3:4], all_rows, 10).ids[0].tolist()
    assert_near(found, queries, all_rows, 10)
    assert scanned == [len(queries), 1]


def test_a_graph_below_its_target_does_not_serve(gpu, search, monkeypatch, caplog):
    made = []

    def make(*given):
        made.append(faiss_module.Cagra(*given))
        return made[-1]

    monkeypatch.setattr(gpu_copy, "_RETRY_S", 0)
    monkeypatch.setattr(gpu_graph, "Cagra", make)
    monkeypatch.setattr(
        faiss_module.Cagra, "search", lambda self, queries, top, *_: scan(queries, queries, top)
    )
    caplog.set_level(logging.WARNING)
    assert search(10) is None
    assert search(10) is None
    assert (gpu.graph_choice, len(made)) == (None, 1), "a failed audit is not repeated"
    (record,) = caplog.records
    assert record.message == (
        "collections on the GPU are scanned, without a graph: no effort up to 512 reaches a recall of "
        f"{TARGET}"
    )


def test_a_graph_that_is_hardly_faster_does_not_serve(gpu, search, monkeypatch, caplog):
    monkeypatch.setattr(gpu_graph, "_LEAST_SPEEDUP", 1e9)
    assert search(10) is None
    assert "it has to be 1000000000.0 times as fast as a scan, and is " in caplog.text


@pytest.mark.parametrize("error", [MemoryError("std::bad_alloc"), RuntimeError("CUDA\nmore")])
@pytest.mark.parametrize("method", ["__init__", "search"])
def test_a_graph_that_cannot_be_made_is_not_tried_again(
    gpu, search, monkeypatch, caplog, method, error
):
    tries = []

    def fail(*given):
        tries.append(given)
        raise error

    monkeypatch.setattr(gpu_copy, "_RETRY_S", 0)
    monkeypatch.setattr(faiss_module.Cagra, method, fail)
    assert search(10) is None
    assert search(10) is None
    assert len(tries) == 1
    assert caplog.messages[-1].endswith(f"without a graph: {str(error).splitlines()[0]}")


def test_a_graph_that_fails_in_a_search_leaves_it_to_the_scan(gpu, search, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(gpu_copy, "_RETRY_S", 0)
    assert search(10) is not None
    with monkeypatch.context() as broken:
        broken.setattr(faiss_module.Cagra, "search", fail)
        assert search(10) is None
    assert gpu.graph_choice is None
    assert search(10) is None
    assert gpu._copy.made is not None, "the scan goes on"
    assert caplog.messages[-1].endswith("without a graph: CUDA error")


def test_one_graph_is_made_at_a_time(search, monkeypatch):
    with gpu_vectors._making_a_graph:
        assert search(10) is None
    assert search(10) is not None


def test_a_graph_that_takes_too_much_ram_is_not_made(gpu, search, monkeypatch, caplog):
    monkeypatch.setattr(gpu_graph, "memory_limit_bytes", lambda: 4 * 768 * NUM - 4)
    assert search(10) is None
    assert f"{768 * NUM:,} bytes of RAM are needed, {768 * NUM - 1:,} may be taken" in caplog.text


def test_few_bytes_and_a_faiss_without_cuvs_are_scanned(gpu, search, monkeypatch):
    with monkeypatch.context() as small:
        small.setattr(gpu_vectors, "GRAPH_LEAST_BYTES", 4 * NUM * DIMENSION + 1)
        assert search(10) is None
    with monkeypatch.context() as plain:
        plain.setattr(faiss_module, "searches_on_gpus", lambda: False)
        assert search(10) is None
    assert search(10) is not None
