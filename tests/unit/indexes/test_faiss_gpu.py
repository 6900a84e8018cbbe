"""The cells of faiss on a GPU, with clones on the CPU in the role of its copies, and on a real one
where faiss-gpu-cuvs finds it.
"""

import logging
import time

import numpy as np
import pytest

from mlcd.indexes import gpu_copy
from mlcd.indexes.tuning import tune
from mlcd.types import unit_rows
from tests.faiss_clones import let_clones_be_copies

faiss = pytest.importorskip("faiss")
module = pytest.importorskip("mlcd.indexes.faiss")
REAL = pytest.param(
    "real",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not module.searches_on_gpus(), reason="needs faiss-gpu-cuvs and a GPU"),
    ],
)


@pytest.fixture(params=["clone", REAL])
def copies(request, monkeypatch):
    """The indexes that were copied."""
    if request.param == "clone":
        return let_clones_be_copies(monkeypatch)
    copied, copy = [], faiss.index_cpu_to_gpu
    monkeypatch.setattr(
        faiss, "index_cpu_to_gpu", lambda *given: copied.append(given[2]) or copy(*given)
    )
    monkeypatch.setattr(gpu_copy, "_PATIENCE_S", 60)
    monkeypatch.setattr(module, "searches_on_gpus", module.searches_on_gpus.__wrapped__)
    return copied


@pytest.fixture
def rows():
    return unit_rows(np.random.default_rng(0).standard_normal((4000, 24)))


@pytest.fixture(params=["ivf-sq8", pytest.param("ivf-pq", marks=pytest.mark.slow)])
def index(request, rows, copies):
    index = module.FaissIndex.train(request.param, rows, num_rows=4000)
    index.add(rows[:3000])
    return index


def assert_alike(neighbors, index, queries, top, **options):
    """A GPU may round scores another way: of a hundred neighbors, one may be another."""
    copied, index._search_gpu = index._search_gpu, lambda *_: None
    expected = index.search(queries, top, **options)
    index._search_gpu = copied
    assert (neighbors.ids == expected.ids).mean() > 0.99
    found = expected.ids >= 0
    assert neighbors.scores[found] == pytest.approx(expected.scores[found], abs=0.01)


def test_it_finds_what_the_cpu_finds(index, rows, copies):
    queries = unit_rows(rows[:50] + 0.1 * rows[50:100])
    allowed = np.arange(3000) % 5 == 2
    for options in ({}, {"effort": 4}, {"allowed": allowed, "effort": 8}, {"effort": 62}):
        neighbors = index.search(queries, 10, **options)
        assert_alike(neighbors, index, queries, 10, **options)
        if "allowed" in options:
            assert (neighbors.ids[neighbors.ids >= 0] % 5 == 2).all()
    assert index.on_gpu
    assert len(copies) == 1


def test_rows_that_are_added_are_copied(index, rows, copies, tmp_path):
    index.search(rows[:1], 1)
    index.add(rows[3000:])
    assert not index.on_gpu
    found = index.search(rows[3000:], 1, effort=62).ids[:, 0]
    assert (found == np.arange(3000, 4000)).mean() > 0.9
    assert (index.on_gpu, len(copies)) == (True, 2)
    index.write(tmp_path / "index")
    assert module.FaissIndex.read(tmp_path / "index").num_rows == 4000


@pytest.mark.parametrize(("top", "options"), [(2049, {}), (1, {"effort": 2049})])
def test_beyond_faisss_bound_the_cpu_searches(index, rows, copies, top, options):
    assert (index.search(rows[:5], top, **options).ids[:, 0] >= 0).all()
    assert (index.on_gpu, copies) == (False, [])


def test_a_graph_and_a_faiss_without_cuvs_are_searched_on_the_cpu(index, rows, copies, monkeypatch):
    graph = module.FaissIndex.train("hnsw", rows, num_rows=4000)
    graph.add(rows)
    assert graph.search(rows[:5], 1).ids[:, 0].tolist() == list(range(5))
    monkeypatch.setattr(faiss, "get_compile_options", lambda: "OPTIMIZE GPU ")
    index.search(rows[:5], 1)
    assert copies == []


def test_without_memory_on_the_gpu_the_cpu_searches(index, rows, copies, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("Error in StandardGpuResourcesImpl: out of memory\nmore")

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(gpu_copy, "_RETRY_S", 0)
    with monkeypatch.context() as full:
        full.setattr(gpu_copy, "free_bytes", lambda: 50_000)
        index.search(rows[:5], 1)
    assert copies == []
    for failing in (faiss, "index_cpu_to_gpu"), (module._GpuCells, "search"):
        with monkeypatch.context() as broken:
            broken.setattr(*failing, fail)
            assert_alike(index.search(rows[:5], 10), index, rows[:5], 10)
            assert not index.on_gpu
    (record,) = caplog.records
    assert "are needed, 40,000 may be taken" in record.message
    index.search(rows[:5], 1)
    assert index.on_gpu


def test_the_audit_is_of_what_the_gpu_finds(copies, rows, monkeypatch):
    """It accepts the copy's answers, and no index whose copy finds something else."""
    tuned = tune(rows, 0.9, kind="ivf-sq8")
    assert tuned.index is not None
    assert copies
    assert tuned.recall.low >= 0.9
    search = module._GpuCells.search
    monkeypatch.setattr(
        module._GpuCells,
        "search",
        lambda self, queries, *given: search(self, np.ascontiguousarray(queries[::-1]), *given),
    )
    assert tune(rows, 0.9, kind="ivf-sq8").index is None


def test_the_audit_waits_for_a_copy_that_searches_do_not_wait_for(copies, rows, monkeypatch):
    make = module._GpuCells.__init__
    calls = []

    def make_slowly(self, index):
        time.sleep(1)
        make(self, index)

    def count(owner):
        search = owner.search
        monkeypatch.setattr(
            owner, "search", lambda *given, **named: calls.append(owner) or search(*given, **named)
        )

    monkeypatch.setattr(gpu_copy, "_PATIENCE_S", 0)
    monkeypatch.setattr(module._GpuCells, "__init__", make_slowly)
    count(module.FaissIndex)
    count(module._GpuCells)
    tune(rows, 0.9, kind="ivf-sq8")
    assert calls.count(module._GpuCells) == calls.count(module.FaissIndex) > 0
