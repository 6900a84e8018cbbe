"""The scan against float64, over block borders and subsets."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from mlcd.clustering import row_threads
from mlcd.indexes import scan as module
from mlcd.indexes.scan import scan
from mlcd.types import unit_rows


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_ROWS", 64)
    monkeypatch.setattr(module, "_BLOCK_QUERIES", 7)


@pytest.mark.parametrize("subset", [None, 0, 5, 300])
@pytest.mark.parametrize("top", [1, 10, 70])
def test_it_finds_what_float64_finds(subset, top):
    generator = np.random.default_rng(0)
    rows, queries = (
        unit_rows(generator.standard_normal((500, 16))),
        unit_rows(generator.standard_normal((20, 16))),
    )
    allowed = None if subset is None else np.sort(generator.choice(500, subset, replace=False))
    found = scan(queries, rows, top, allowed_rows=allowed)
    among = np.arange(500) if allowed is None else allowed
    truth = queries.astype(np.float64) @ rows[among].astype(np.float64).T
    wanted = min(top, len(among))
    assert found.ids.shape == (20, top)
    assert ((found.ids >= 0).sum(axis=1) == wanted).all()
    assert found.scores[:, :wanted] == pytest.approx(
        np.sort(truth, axis=1)[:, ::-1][:, :wanted], abs=1e-6
    )
    assert set(found.ids[found.ids >= 0].tolist()) <= set(among.tolist())
    assert all(len(set(ids[:wanted])) == wanted for ids in found.ids.tolist())


def test_no_queries_find_nothing():
    assert scan(np.empty((0, 4), np.float32), np.eye(4, dtype=np.float32), 3).ids.shape == (0, 3)


@pytest.mark.parametrize("num_rows", [40, 500])
def test_each_product_has_one_thread_and_the_others_theirs_again(monkeypatch, num_rows):
    def numbers():
        found = [pool for pool in threadpool_info() if "numpy" in pool["filepath"]]
        return {pool["num_threads"] for pool in found if pool["user_api"] == "blas"}

    seen, compare = [], module._compare
    monkeypatch.setattr(
        module, "_compare", lambda *given: seen.append(numbers()) or compare(*given)
    )
    rows = unit_rows(np.random.default_rng(0).standard_normal((num_rows, 16)))
    with threadpool_limits(2, user_api="blas"):
        # not the first thread alone, as threadpoolctl would have it
        for thread in (ThreadPoolExecutor(1), ThreadPoolExecutor(1)):
            with thread:
                thread.submit(scan, rows[:1], rows, 3).result()
            assert numbers() == {2}
    assert len(seen) == 2 * -(-num_rows // 64)
    assert set.union(*seen) == {1}


def test_a_search_goes_on_where_the_libraries_cannot_be_looked_at(monkeypatch):
    def refused(kind):
        raise OSError(24, f"Too many open files to look at {kind}")

    monkeypatch.setattr(row_threads, "_libraries", refused)
    rows = np.eye(4, dtype=np.float32)
    assert scan(rows[2:3], rows, 1).ids.tolist() == [[2]]
