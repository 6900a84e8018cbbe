"""k-means whose rows stay on a device, with the CPU in the device's place, against the sums of the
host: the same bits. tests/unit/clustering/test_cuda_scan.py asks a GPU.
"""

import numpy as np
import pytest
import torch

from mlcd.clustering import device_members, device_scan
from mlcd.clustering import kmeans as kmeans_module
from mlcd.clustering import rows as rows_module
from mlcd.clustering.bounded_sizes import bound_sizes
from mlcd.clustering.device_members import DeviceMembers
from mlcd.clustering.device_scan import DeviceScan
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.rows import ArrayRows, UnitRows
from mlcd.errors import InvalidInput, Unavailable
from mlcd.types import unit_rows
from mlcd.world import World
from tests.ranks import run_ranks
from tests.unit.clustering import processes

BLOCK, DIMENSION = 500, 66
ROW_BYTES = 4 * DIMENSION


def drawn_rows(num_rows=3333, seed=0):
    random = np.random.default_rng(seed)
    means = random.standard_normal((60, DIMENSION))[random.integers(0, 60, num_rows)]
    return unit_rows(means + 0.8 * random.standard_normal(means.shape))


def repeated_rows():
    rows = drawn_rows()
    rows[:400], rows[1000:1100] = rows[0], -rows[0]
    return rows


@pytest.fixture
def passes(monkeypatch):
    """Makes k-means use the device from its first centers, which are rows, on; returns the number
    of rows that stay there after each pass.
    """
    stay, assign = [], DeviceMembers.assign

    def noted(self, centers):
        moved = assign(self, centers)
        stay.append(sum(len(block) for _, block in self._blocks))
        return moved

    monkeypatch.setattr(DeviceMembers, "assign", noted)
    monkeypatch.setattr(rows_module, "BLOCK_ROWS", BLOCK)
    monkeypatch.setattr(kmeans_module, "_SEVERAL_CLUSTERS", np.inf)
    processes.use_device(monkeypatch.setattr)
    return stay


def on_host(cluster):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kmeans_module, "fastest_matmuls", lambda *_, **__: ["numpy"])
        return cluster()


def check_same(device, host):
    for name in ("centers", "sizes", "cosines", "assignment"):
        values, expected = getattr(device, name), getattr(host, name)
        assert values.dtype == expected.dtype, name
        assert values.tobytes() == expected.tobytes(), name
    assert (device.objective, device.num_splits) == (host.objective, host.num_splits)


@pytest.mark.parametrize(("room", "staying"), [(None, 3333), (1300 * ROW_BYTES, 1000), (0, 0)])
@pytest.mark.parametrize("draw", [drawn_rows, repeated_rows])
@pytest.mark.parametrize("seed", [0, 7])
def test_rows_that_stay_or_are_read_again_give_the_bits_of_the_host(
    room, staying, draw, seed, passes, monkeypatch
):
    monkeypatch.setattr(kmeans_module, "_ROWS_ON_DEVICE", room)

    def cluster():
        return kmeans([draw()], 101, iterations=5, seed=seed, tolerance=0.0)

    result = cluster()
    assert passes == [staying] * len(result.objective)
    check_same(result, on_host(cluster))


@pytest.mark.parametrize("num_rows", [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK])
def test_any_number_of_rows(num_rows, passes):
    def cluster():
        return kmeans([drawn_rows(num_rows)], min(num_rows, 37), iterations=3)

    check_same(cluster(), on_host(cluster))
    assert passes


def test_rows_between_centers_go_to_the_lower_id(passes, monkeypatch):
    settled, nearest = [], CenterScan.nearest
    monkeypatch.setattr(
        device_members.CenterScan,
        "nearest",
        lambda self, rows, top: settled.append(len(rows)) or nearest(self, rows, top),
    )
    axes = np.eye(DIMENSION, dtype=np.float32)
    rows = unit_rows(np.concatenate([axes[:1] + axes[1:2]] * 9 + [axes]))

    def cluster():
        return kmeans([rows], 4, iterations=0, start=axes[[3, 1, 0, 2]])

    result = cluster()
    assert result.assignment[:9].tolist() == [1] * 9
    assert settled[0] >= 9
    check_same(result, on_host(cluster))


def test_rows_whose_center_stays_are_compared_with_those_that_differ(passes, monkeypatch):
    """Counts the products of rows and centers, of which the last passes need few."""
    products, nearest = [], DeviceScan.nearest

    def count(self, rows, top=1, also_B=None):
        products.append(len(rows) * self._num_centers)
        return nearest(self, rows, top, also_B)

    monkeypatch.setattr(DeviceScan, "nearest", count)

    def cluster():
        return kmeans([drawn_rows()], 600, iterations=20, tolerance=0.0)

    result = cluster()
    assert len(passes) == len(result.objective) == 21
    assert sum(products) < 0.5 * 21 * 3333 * 600
    check_same(result, on_host(cluster))


def test_a_center_that_differs_takes_rows_of_centers_that_do_not():
    """Also a row that it is as near to as its own: of two equal centers the first has it."""
    axes = np.eye(DIMENSION, dtype=np.float32)
    first = np.repeat(axes[:40], 2, axis=0)
    first[::2] = -first[::2]
    first[78] = unit_rows(axes[12:13] + 0.3 * axes[13:14])[0]
    second = first.copy()
    second[10], second[30] = axes[5], axes[24]  # as near as center 11 and as center 49 are
    second[70] = unit_rows(axes[7:8] + 0.1 * axes[8:9])[0]
    # The nearest to row 12 moves away and another one comes, but center 78 is nearer.
    second[25], second[40] = -axes[12], unit_rows(axes[12:13] + axes[14:15])[0]
    rows = unit_rows(np.concatenate([axes[:40], axes[7:8] + 0.2 * axes[8:9], axes[7:8]]))
    members = DeviceMembers(UnitRows(ArrayRows([rows])), 80, World(), "cpu", None)
    for centers in (first, second, second, first):
        members.assign(centers)
        assert np.array_equal(members.assignment, CenterScan(centers).nearest(rows, 1).ids[:, 0])


def test_empty_clusters_are_refilled_alike(passes):
    rows = drawn_rows()
    start = np.repeat(rows[:2], 20, axis=0)

    def cluster():
        return kmeans([rows], 40, iterations=4, start=start, tolerance=0.0)

    result = cluster()
    assert passes
    assert result.num_splits >= 38
    check_same(result, on_host(cluster))


def test_a_mean_is_subtracted_and_sizes_are_bounded_alike(passes):
    rows = UnitRows(ArrayRows([drawn_rows()]), np.full(DIMENSION, 0.05, np.float32))

    def cluster():
        return bound_sizes(rows, kmeans(rows, 30, iterations=3), 130)

    result = cluster()
    assert passes
    assert result.sizes.max() <= 130
    check_same(result, on_host(cluster))


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_row_without_direction_is_refused_by_its_id(value, passes):
    rows = drawn_rows()
    start = rows[:40].copy()
    rows[1234] = value
    with pytest.raises(InvalidInput, match="row 1234"):
        kmeans([rows], 40, start=start)
    assert not passes


def test_a_run_continues_from_its_last_state(passes):
    rows, states = drawn_rows(), []

    def stop(state):
        states.append(state)
        if state.iteration == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kmeans([rows], 90, iterations=6, tolerance=0.0, on_start=stop)
    resumed = kmeans([rows], 90, iterations=6, tolerance=0.0, start=states[-1])
    assert len(passes) == 3 + 4
    check_same(resumed, on_host(lambda: kmeans([rows], 90, iterations=6, tolerance=0.0)))


@pytest.mark.parametrize("call", [0, 20])
def test_without_memory_the_host_continues(call, passes, monkeypatch, caplog):
    calls, nearest = [], DeviceScan.nearest

    def full(self, rows, top=1, also_B=None):
        calls.append(len(rows))
        if len(calls) > call:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return nearest(self, rows, top, also_B)

    def refuse(_):
        raise Unavailable("centers do not fit", remedy="take numpy")

    monkeypatch.setattr(DeviceScan, "nearest", full)
    monkeypatch.setattr(device_scan, "cuda_available", lambda: True)
    monkeypatch.setattr(device_scan, "on_gpu", refuse)

    def cluster():
        return kmeans([drawn_rows()], 90, iterations=5, tolerance=0.0)

    result = cluster()
    assert len(passes) == call // 7  # seven blocks per pass
    assert caplog.text.count("k-means sums on the CPU: the GPU has too little memory") == 1
    check_same(result, on_host(cluster))


def test_two_processes_have_the_bits_of_one(tmp_path):
    for size in (1, 2):
        run_ranks(processes.run_on_device, size, str(tmp_path))
    one, *two = (np.load(tmp_path / f"{name}.npz") for name in ("1-0", "2-0", "2-1"))
    for name in ("centers", "sizes", "objective", "moved"):
        assert {each[name].tobytes() for each in two} == {one[name].tobytes()}, name
    assert np.array_equal(np.concatenate([each["assignment"] for each in two]), one["assignment"])
    assert all(each["passes"] == 5 for each in (one, *two))
    host = kmeans([processes.rows()], 40, iterations=4, tolerance=0.0)
    assert one["centers"].tobytes() == host.centers.tobytes()
