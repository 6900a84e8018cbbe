"""Searches on a GPU against the CPU's scan, with torch on the CPU in its role, and on a real one."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.indexes import gpu_copy, gpu_vectors
from mlcd.indexes.gpu_copy import GpuCopy
from mlcd.indexes.gpu_vectors import GpuVectors
from mlcd.indexes.scan import scan
from mlcd.types import unit_rows

torch = pytest.importorskip("torch")
device_rows = pytest.importorskip("mlcd.indexes.device_rows")
NUM_INDEXED, DIMENSION = 3000, 24
ON_GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    ],
)


def drawn(num, seed):
    return unit_rows(np.random.default_rng(seed).standard_normal((num, DIMENSION)))


@pytest.fixture
def all_rows():
    return drawn(5000, seed=0)


@pytest.fixture(params=["cpu", ON_GPU], autouse=True)
def device(request, monkeypatch):
    monkeypatch.setattr(gpu_copy, "find_gpu", lambda: request.param)
    monkeypatch.setattr(gpu_copy, "_PATIENCE_S", 60)
    monkeypatch.setattr(gpu_vectors, "LEAST_ROWS", 1000)
    monkeypatch.setattr(device_rows, "_BLOCK_QUERIES", 7)
    monkeypatch.setattr(device_rows, "_BLOCK_SCORES", 7 * 512)
    if request.param == "cpu":
        monkeypatch.setattr(device_rows, "free_bytes", lambda: 1 << 40)
    return request.param


@pytest.fixture
def search(all_rows):
    """Searches the first `num` rows, of which those after the generation's were added."""
    gpu = GpuVectors()
    indexed, added = all_rows[:NUM_INDEXED], all_rows[NUM_INDEXED:]

    def run(queries, top, num=5000, allowed=None):
        return gpu.scan(queries, top, indexed, added[: num - NUM_INDEXED], allowed)

    return run


def assert_same(neighbors, queries, rows, top, allowed=None):
    among = None if allowed is None else np.flatnonzero(allowed)
    truth = scan(queries, rows, top, allowed_rows=among)
    assert neighbors.ids.dtype == np.int64
    assert neighbors.ids.shape == truth.ids.shape
    assert ((neighbors.ids < 0) == (truth.ids < 0)).all()
    present = truth.ids >= 0
    assert neighbors.scores[present] == pytest.approx(truth.scores[present], abs=1e-6)
    assert np.isneginf(neighbors.scores[~present]).all()
    own = np.einsum("qkd,qd->qk", rows[neighbors.ids], queries)
    assert own[present] == pytest.approx(neighbors.scores[present], abs=1e-6)
    assert all(len(set(ids[ids >= 0])) == (ids >= 0).sum() for ids in neighbors.ids)
    if allowed is not None:
        assert allowed[neighbors.ids[present]].all()


@pytest.mark.parametrize("share", [None, 0.0, 0.001, 0.5])
@pytest.mark.parametrize("top", [1, 10, 2500, 6000])
def test_it_finds_what_the_scan_of_the_cpu_finds(search, all_rows, top, share):
    queries = drawn(20, seed=1)
    allowed = None if share is None else np.random.default_rng(2).random(len(all_rows)) < share
    assert_same(search(queries, top, allowed=allowed), queries, all_rows, top, allowed)


def test_rows_that_are_added_are_found_and_an_earlier_state_has_only_its_own(search, all_rows):
    queries = drawn(5, seed=1)
    for num in (3000, 3001, 4999, 3500, 5000, 3000):
        assert_same(search(queries, 50, num), queries, all_rows[:num], 50)
        assert (search(all_rows[num - 1 : num], 1, num).ids == num - 1).all()


def test_equals_come_in_the_order_of_their_ids(all_rows):
    same = np.repeat(all_rows[:1], 3000, axis=0)
    ids = GpuVectors().scan(same[:1], 3000, same, same[:0], None).ids
    assert ids[0].tolist() == list(range(3000))


def test_threads_search_and_add_at_once(search, all_rows):
    search(all_rows[:1], 1, 3000)
    with ThreadPoolExecutor(8) as threads:
        nums = [3000 + 37 * n for n in range(50)]
        queries = [all_rows[num - 1 : num] for num in nums]
        answers = threads.map(search, queries, [3] * 50, nums)
        for neighbors, query, num in zip(answers, queries, nums, strict=True):
            assert_same(neighbors, query, all_rows[:num], 3)


def test_the_cpu_searches_while_one_thread_copies(monkeypatch):
    copy, may_end, copies = GpuCopy("rows"), Event(), []

    def make():
        may_end.wait(30)
        copies.append("copy")
        return copies[-1]

    monkeypatch.setattr(gpu_copy, "_PATIENCE_S", 0.01)
    for _ in range(3):
        assert copy.use(make, 0, str.upper) is None
    may_end.set()
    while copy.made is None:
        time.sleep(0.01)
    assert copy.use(make, 0, str.upper) == "COPY"
    copy.copy_now(make, 0)  # of a search that began before the copy was there
    assert copies == ["copy"]


def test_no_queries_find_nothing(search, all_rows):
    assert search(all_rows[:0], 3).ids.shape == (0, 3)


def test_few_rows_stay_on_the_cpu(all_rows):
    few = all_rows[:999]
    assert GpuVectors().scan(few[:1], 1, few, few[:0], None) is None


def test_without_a_gpu_the_cpu_searches(all_rows, monkeypatch):
    monkeypatch.setattr(gpu_copy, "find_gpu", lambda: None)
    monkeypatch.setattr(device_rows, "DeviceRows", None)
    assert GpuVectors().scan(all_rows[:1], 1, all_rows, all_rows[:0], None) is None


def test_a_gpu_with_too_little_memory_leaves_the_search_to_the_cpu(
    search, all_rows, monkeypatch, caplog
):
    needed = 1.5 * 4 * all_rows.size + (1 << 30)
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(device_rows, "free_bytes", lambda: needed / 0.8 - 2)
    assert search(all_rows[:1], 1) is None
    monkeypatch.setattr(device_rows, "free_bytes", lambda: needed / 0.8 + 2)
    assert search(all_rows[:1], 1) is None, "it is tried again after a minute only"
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        f"{int(needed):,} bytes are needed, {int(needed) - 2:,} may be taken"
    ]
    monkeypatch.setattr(gpu_copy, "_RETRY_S", 0)
    fresh = GpuVectors()
    assert fresh.scan(all_rows[:1], 1, all_rows, all_rows[:0], None).ids.tolist() == [[0]]


def test_a_gpu_that_fails_in_a_search_leaves_it_to_the_cpu_until_it_works(
    search, all_rows, monkeypatch, caplog
):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore lines")

    monkeypatch.setattr(gpu_copy, "_RETRY_S", 0)
    assert search(all_rows[:1], 1).ids.tolist() == [[0]]
    with monkeypatch.context() as broken:
        broken.setattr(device_rows, "_search", fail)
        assert search(all_rows[:1], 1) is None
        assert search(all_rows[:1], 1) is None
    assert len(caplog.records) == 1
    assert caplog.records[0].message.endswith("on the CPU, not on the GPU: CUDA out of memory.")
    assert search(all_rows[:1], 1).ids.tolist() == [[0]]


def test_a_collection_is_searched_on_the_gpu_while_it_changes(tmp_path, all_rows, device):
    def check(collection, present, **options):
        found = collection.search(queries, 10, **options)
        assert (found.by, found.exact, found.matching) == ("gpu", True, len(present))
        truth = scan(queries, all_rows, min(10, len(present)), allowed_rows=np.array(present))
        assert [[int(match.id) for match in row] for row in found.matches] == truth.ids.tolist()

    queries, path = drawn(20, seed=1), tmp_path / "c"
    with Collection.create(
        path, fingerprint="a" * 64, dimension=DIMENSION, background=False
    ) as collection:
        collection.add([Item(str(n), all_rows[n], {"n": n}) for n in range(2000)])
        check(collection, range(2000))
        collection.reindex()
        collection.delete_all([str(n) for n in range(0, 2000, 2)])
        check(collection, range(1, 2000, 2))
        collection.add([Item(str(n), all_rows[n], {"n": n}) for n in range(2000, 5000)])
        check(collection, [*range(1, 2000, 2), *range(2000, 5000)])
        check(collection, range(3000, 3005), filter={"field": "n", "ge": 3000, "lt": 3005})
        collection.reindex()
        check(collection, [*range(1, 2000, 2), *range(2000, 5000)])
    with Collection.open(path, read_only=True) as collection:
        check(collection, [*range(1, 2000, 2), *range(2000, 5000)])
