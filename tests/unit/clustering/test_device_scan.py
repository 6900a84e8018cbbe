"""The scan of a device, with the CPU in the device's place, against the CPU's own scan: the same
bounds and the same steps; tests/unit/clustering/test_cuda_scan.py asks a GPU and its kernels.
"""

import numpy as np
import pytest
import torch

from mlcd.clustering import device_scan, nearest
from mlcd.clustering import kmeans as kmeans_module
from mlcd.clustering.device_products import GROUP, TILE, in_float64, maxima, of_members
from mlcd.clustering.device_scan import DeviceScan, _Largest
from mlcd.clustering.nearest import CenterScan
from mlcd.errors import Unavailable
from mlcd.types import unit_rows


def drawn(num, dimension, seed=0):
    return unit_rows(np.random.default_rng(seed).standard_normal((num, dimension)))


def families():
    """Draws groups of 32 centers that bfloat16 hardly tells apart, and rows near them."""
    centers = unit_rows(np.repeat(drawn(400, 96), 32, axis=0) + 0.002 * drawn(12800, 96, seed=1))
    chosen = np.random.default_rng(2).integers(0, len(centers), 200)
    return unit_rows(centers[chosen] + 0.3 * drawn(200, 96, seed=3)), centers


def duplicates():
    """Draws centers of which a third is one and the same, and rows of which some are it."""
    centers = drawn(9001, 64)
    centers[::3] = centers[0]
    return np.concatenate([drawn(100, 64, seed=5), centers[:1].repeat(5, axis=0)]), centers


def long_rows():
    rows, centers = drawn(50, 64, seed=1) * np.float32(1e4), drawn(9000, 64)
    return rows, centers * np.random.default_rng(3).uniform(0.1, 9, (9000, 1)).astype(np.float32)


DATA = {
    "tiles enough": lambda: (drawn(300, 96, seed=1), drawn(90_000, 96)),
    "groups alone": lambda: (drawn(300, 96, seed=1), drawn(300, 96)),
    "as few centers as are asked for": lambda: (drawn(50, 96, seed=1), drawn(8, 96)),
    "no multiple of anything": lambda: (drawn(50, 33, seed=1), drawn(1003, 33)),
    "negative scores alone": lambda: (-np.abs(drawn(50, 64, seed=1)), np.abs(drawn(5001, 64))),
    "families": families,
    "duplicates": duplicates,
    "one center many times": lambda: (drawn(20, 64, seed=1), np.tile(drawn(1, 64), (5000, 1))),
    "any length": long_rows,
}


def on_device(centers):
    scan = CenterScan(centers, matmul="numpy")
    scan._way = nearest._Way(scan._exact, DeviceScan(centers, "cpu"))
    return scan


@pytest.mark.parametrize("top", [1, 8])
@pytest.mark.parametrize("name", DATA)
def test_the_answer_is_the_very_one_of_the_cpu(name, top):
    rows, centers = DATA[name]()
    found, plain = on_device(centers).nearest(rows, top), CenterScan(centers).nearest(rows, top)
    assert found.scan.products == "bf16 cpu"
    assert np.array_equal(found.ids, plain.ids)
    assert np.array_equal(found.scores, plain.scores)
    if name in ("tiles enough", "groups alone"):
        assert found.scan.proven == len(rows)


@pytest.mark.parametrize("num", [4096, 16384])  # groups alone, tiles
def test_a_row_beside_its_own_center_is_proven_far_from_the_others_whatever_they_are(num):
    """The others are a family of near copies, which bfloat16 cannot tell apart."""
    family = unit_rows(drawn(1, 96) + 0.002 * drawn(num, 96, seed=1))
    own = drawn(64, 96, seed=2)
    rows = torch.from_numpy(unit_rows(own + 0.1 * drawn(64, 96, seed=3)))
    scan = DeviceScan(np.concatenate([family, own]), "cpu")
    with torch.inference_mode():
        places = torch.arange(num, num + 64)
        found, unproven = scan.first(num).nearest(rows, also_B=places)
    assert torch.equal(found[:, 0], places)
    assert not len(unproven)


@pytest.mark.parametrize("on", [on_device, lambda centers: CenterScan(centers, matmul="numpy")])
@pytest.mark.parametrize("top", [1, 8])
@pytest.mark.parametrize("size", [1.5e19, 3.4e38])
def test_what_float32_has_no_room_for_is_settled_in_float64(size, top, on):
    """Sums overflow on the way, to either side, and in bfloat16 components do by themselves."""
    random = np.random.default_rng(0)
    rows, centers = (random.standard_normal((num, 64)).astype(np.float32) for num in (20, 1003))
    rows[:9] = np.sign(rows[:9]) * np.float32(size)
    centers[::5] = np.sign(centers[::5]) * np.float32(1.5e19)
    with np.errstate(all="ignore"):
        found = on(centers).nearest(rows, top)
    exact = rows.astype(np.float64) @ centers.astype(np.float64).T
    ids = np.argsort(-exact, axis=1, kind="stable")[:, :top]
    assert np.array_equal(np.sort(found.ids), np.sort(ids))
    assert found.scan.float64 >= 9


def test_the_cpu_orders_only_what_an_order_of_summation_may_change(monkeypatch):
    asked = []
    ordered = nearest.ordered
    monkeypatch.setattr(
        nearest, "ordered", lambda rows, *rest: asked.append(len(rows)) or ordered(rows, *rest)
    )
    rows, centers = DATA["tiles enough"]()
    scan = on_device(centers)
    scan.nearest(rows, 8)
    assert sum(asked) < len(rows) / 10
    asked.clear()
    _, scores, _ = scan.search(rows, 8)
    assert sum(asked) == len(rows)
    plain = CenterScan(centers, matmul="numpy").search(rows, 8)[1]
    assert np.array_equal(scores, plain)
    rows, centers = duplicates()
    asked.clear()
    on_device(centers).nearest(rows, 8)
    assert sum(asked) >= 5  # the rows that are the center of which there are many
    asked.clear()
    row, centers = np.zeros((1, 64), np.float32), drawn(300, 64) / 10
    row[0, :2] = 1
    centers[7] = 0
    centers[7, :2] = 1, 2.0**-24  # its score is the middle of two float32 numbers
    assert on_device(centers).nearest(row, 1).ids == 7
    assert asked == [1]


def test_an_answer_is_clear_where_neither_order_nor_rounding_is_in_doubt():
    near = 1 + 2.0**-24  # the middle of two float32 numbers
    values = torch.tensor(
        [[4, 3, 2, 1], [4, 4, 2, 1], [4, 3, 3, 1], [near, 0.5, 0.25, 0], [4, 0, -1, -2]],
        dtype=torch.float64,
    )
    largest = _Largest(values, torch.zeros(5, 4, dtype=torch.int64), all=False)
    apart = torch.full((5, 1), 1e-13, dtype=torch.float64)
    assert largest.in_order(2, apart).tolist() == [True, False, False, True, True]
    assert largest.rounded_alike(2, apart).tolist() == [True, True, True, False, False]


def test_equal_centers_come_in_the_order_of_their_ids():
    twice = np.random.default_rng(7).permutation(np.repeat(drawn(4000, 64), 2, axis=0))
    found = on_device(twice).nearest(drawn(200, 64, seed=1), 7)
    plain = CenterScan(twice, matmul="numpy").nearest(drawn(200, 64, seed=1), 7)
    assert np.array_equal(found.ids, plain.ids)


def test_rows_without_room_are_asked_for_again_and_then_settled_by_the_cpu(monkeypatch):
    rows, centers = families()
    monkeypatch.setattr(nearest, "_ROOM_LEAST", 1)
    monkeypatch.setattr(DeviceScan, "rooms", (1, 40))
    found = on_device(centers).nearest(rows, 8)
    assert found.scan.wider > 0
    assert found.scan.proven < len(rows)
    monkeypatch.setattr(DeviceScan, "rooms", (1, 2))
    again = on_device(centers).nearest(rows, 8)
    assert again.scan.float32 > 0
    plain = CenterScan(centers).nearest(rows, 8)
    assert np.array_equal(found.ids, plain.ids)
    assert np.array_equal(again.ids, plain.ids)
    assert np.array_equal(again.scores, plain.scores)


def test_a_device_without_memory_leaves_the_rows_to_the_cpu(monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    rows, centers = DATA["groups alone"]()
    plain = CenterScan(centers, matmul="numpy").nearest(rows, 8)
    scan = on_device(centers)
    monkeypatch.setattr(device_scan, "maxima", full)
    found = scan.nearest(rows, 8)
    assert found.scan.float32 == len(rows)
    assert np.array_equal(found.ids, plain.ids)
    assert np.array_equal(found.scores, plain.scores)
    monkeypatch.setattr(device_scan, "cuda_available", lambda: True)
    monkeypatch.setattr(device_scan, "mean_of", full)
    with pytest.raises(Unavailable, match="300 centers do not fit on the GPU"):
        CenterScan(centers, matmul="cuda-bf16")
    monkeypatch.setattr(nearest, "fastest_matmuls", lambda *_, **__: ["cuda-bf16", "numpy"])
    monkeypatch.setattr(nearest, "WORTH_TORCH", 0)
    found = CenterScan(centers).nearest(rows, 8)
    assert (found.scan.products, found.scan.proven) == ("numpy fp32", len(rows))
    assert np.array_equal(found.ids, plain.ids)
    monkeypatch.setattr(kmeans_module, "_DEVICE", "cpu")
    monkeypatch.setattr(kmeans_module, "_MANY_CENTERS", 1)
    monkeypatch.setattr(kmeans_module, "WORTH_COMPILING", 0)
    monkeypatch.setattr(kmeans_module, "fastest_matmuls", lambda *_, **__: ["cuda-bf16"])
    assert len(kmeans_module.kmeans([rows], 7, iterations=3).centers) == 7


def test_a_batch_has_fewer_rows_where_there_are_more_centers():
    few, many = (DeviceScan(drawn(num, 64), "cpu").batch_rows for num in (100, 1_000_000))
    assert (few, many) == (4096, 2147)


def test_products_are_those_of_float64_and_of_no_others():
    generator = torch.Generator().manual_seed(0)
    num = 3 * TILE + 2 * GROUP
    rows, centers = (torch.randn((each, 64), generator=generator).bfloat16() for each in (7, num))
    exact = rows.double() @ centers.double().T
    groups, tiles = maxima(rows, centers)
    assert groups.shape == (7, 4 * TILE // GROUP)
    expected = exact.unflatten(1, (-1, GROUP)).amax(dim=2)
    assert torch.allclose(groups[:, : num // GROUP].double(), expected, atol=1e-4)
    assert (groups[:, num // GROUP :] == -torch.inf).all()
    assert torch.equal(tiles, groups.unflatten(1, (4, -1)).amax(dim=2))
    chosen = torch.tensor([[0, -1, 49]]).expand(7, 3)
    products = of_members(rows, centers, chosen).unflatten(1, (3, GROUP))
    assert torch.allclose(products[:, 0].double(), exact[:, :GROUP], atol=1e-4)
    assert torch.allclose(products[:, 2].double(), exact[:, -GROUP:], atol=1e-4)
    assert (products[:, 1] == -torch.inf).all()
    ids = torch.tensor([[5, -1]]).expand(7, 2)
    scores = in_float64(rows.float(), centers.float(), ids)
    assert torch.allclose(scores[:, 0], exact[:, 5])
    assert (scores[:, 1] == -torch.inf).all()
