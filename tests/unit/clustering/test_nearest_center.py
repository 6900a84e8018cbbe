import threading
import tracemalloc

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from mlcd.clustering import kmeans, nearest_center, row_threads
from mlcd.clustering.heads import Heads, main_directions
from mlcd.clustering.nearest import nearest_centers
from mlcd.clustering.nearest_center import NearestCenter, heads_of
from mlcd.types import unit_rows


def decaying(num, dimension, seed, power=1.0):
    weights = (1.0 + np.arange(dimension)) ** -power
    return unit_rows(np.random.default_rng(seed).standard_normal((num, dimension)) * weights)


def cases():
    yield "decaying", decaying(1500, 96, 0), decaying(2100, 96, 1)
    yield "flat", decaying(1500, 96, 0, 0.0), decaying(1025, 96, 1, 0.0)
    centers = np.repeat(decaying(40, 96, 2), 30, axis=0)
    yield "equal centers", decaying(1200, 96, 3), centers
    near = unit_rows(np.repeat(decaying(40, 96, 2), 30, axis=0) + 1e-7 * decaying(1200, 96, 4))
    yield "nearly equal centers", decaying(1200, 96, 3), near
    yield "rows that are centers", centers, centers
    yield "one center", decaying(1100, 96, 5), decaying(1, 96, 6)
    yield (
        "in a narrow cone",
        unit_rows(decaying(1500, 96, 7) + 30 * np.eye(96)[:1]),
        unit_rows(decaying(1400, 96, 8) + 30 * np.eye(96)[:1]),
    )
    yield (
        "all negative",
        unit_rows(decaying(1100, 96, 0) - 3 * np.eye(96)[:1]),
        unit_rows(decaying(700, 96, 1) + 3 * np.eye(96)[:1]),
    )


@pytest.mark.parametrize("num_components", [None, 12, 48])
@pytest.mark.parametrize(
    ("rows", "centers"), [pytest.param(*case[1:], id=case[0]) for case in cases()]
)
def test_every_way_gives_the_nearest_center_and_of_equals_the_first(rows, centers, num_components):
    expected = nearest_centers(rows, centers, 1).ids[:, 0]
    heads = num_components and Heads(main_directions(centers, num_components))
    scan = NearestCenter(centers, heads)
    assert (scan.nearest(rows) == expected).all()
    assert (scan.nearest(rows, expected.astype(np.int32)) == expected).all()
    anything = np.random.default_rng(0).integers(0, len(centers), len(rows)).astype(np.int32)
    assert (scan.nearest(rows, anything) == expected).all()


def test_threads_share_the_rows_where_there_is_work_enough(monkeypatch):
    rows, centers = decaying(2000, 96, 0), decaying(700, 96, 1)
    expected = nearest_centers(rows, centers, 1).ids[:, 0]
    for module in (nearest_center, row_threads):
        monkeypatch.setattr(module, "allowed_threads", lambda: 3)
    monkeypatch.setattr(nearest_center, "_WORTH_THREADS", 1)
    workers = set()
    multiply = NearestCenter._multiply

    def seen(self, z_BD):
        workers.add(threading.current_thread().name)
        return multiply(self, z_BD)

    monkeypatch.setattr(NearestCenter, "_multiply", seen)
    assert (NearestCenter(centers).nearest(rows) == expected).all()
    assert threading.current_thread().name not in workers


def test_rows_of_equal_centers_are_compared_without_threads_of_blas(monkeypatch):
    """They would spin on beside the products of the next rows."""
    num_threads, nearest = [], nearest_center.CenterScan.nearest

    def noted(self, rows, top):
        num_threads.append(row_threads._threads_of_blas())
        return nearest(self, rows, top)

    monkeypatch.setattr(nearest_center.CenterScan, "nearest", noted)
    centers = np.eye(4, dtype=np.float32)
    with threadpool_limits(2, user_api="blas"):
        assert NearestCenter(centers[[0, 1, 1]]).nearest(centers[:2]).tolist() == [0, 1]
        assert row_threads._threads_of_blas() == 2
    assert num_threads == [1]


@pytest.mark.parametrize(("power", "share"), [(1.0, 0.0), (0.3, 1.0), (0.0, 1.0)])
def test_rows_of_which_heads_leave_many_centers_are_multiplied_by_all(power, share):
    rows, centers, multiplied = decaying(6000, 128, 0, power), decaying(4096, 128, 1, power), []

    def search_all(left):
        multiplied.append(len(left))
        return nearest_centers(left, centers, 1).ids[:, 0]

    scan = NearestCenter(centers, heads_of(centers), search_all)
    expected = nearest_centers(rows, centers, 1).ids[:, 0]
    assert (scan.nearest(rows) == expected).all()
    assert abs(sum(multiplied) / len(rows) - share) < 0.1
    assert (scan._heads is None) is (share > 0)  # the next rows do without


@pytest.mark.parametrize("shape", [(200, 1280), (500, 64), (9, 256)])
def test_there_are_no_heads_where_they_take_about_as_long_as_all_components(shape):
    assert heads_of(decaying(*shape, 0)) is None


def test_bounds_hold_against_float64():
    rows, centers = decaying(300, 128, 0), decaying(400, 128, 1)
    exact = rows.astype(np.float64) @ centers.T.astype(np.float64)
    scan = NearestCenter(centers, heads_of(centers))
    ((_, bounds),) = scan._bounds(scan._heads.of(rows))
    assert (exact <= bounds.astype(np.float64) + scan._head_slack).all()
    assert (bounds - exact).mean() < 0.5  # and say something


def test_memory_does_not_grow_with_pairs_that_nothing_prunes():
    centers, rows = decaying(8192, 128, 0, 0.0), decaying(1024, 128, 1, 0.0)
    search = NearestCenter(centers, heads_of(centers))
    tracemalloc.start()
    search.nearest(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(rows) * len(centers)  # the pairs alone took twelve times as much


def test_ties_take_memory_for_few_pairs_at_a_time():
    rng = np.random.default_rng(0)
    centers = unit_rows(np.eye(256)[:1] + 1e-6 * rng.standard_normal((256, 256)))
    search = NearestCenter(centers)
    tracemalloc.start()
    found = search.nearest(centers[:200])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found == nearest_centers(centers[:200], centers, 1).ids[:, 0]).all()
    assert peak < 8 * 200 * 256 * 256 / 4


@pytest.mark.parametrize(("power", "is_skipped"), [(1.0, False), (0.0, True)])
def test_heads_of_little_use_in_a_pass_are_not_tried_in_the_next(power, is_skipped, monkeypatch):
    monkeypatch.setattr(kmeans, "_MANY_ROWS", 0)
    rows, centers = decaying(2048, 96, 0, power), decaying(1100, 96, 1, power)
    nearest = kmeans._Nearest(len(rows), 3)
    ids = None
    for _ in range(3):
        ids = nearest.open(centers)(rows, ids)
    assert (nearest._choose_heads(centers) is None) is is_skipped
    assert (ids == nearest_centers(rows, centers, 1).ids[:, 0]).all()
