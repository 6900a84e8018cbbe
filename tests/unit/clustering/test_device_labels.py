"""Labels of small batches on a device: those of the CPU, or left open."""

import numpy as np
import pytest
import torch

from mlcd.clustering import device_labels
from mlcd.clustering.device_labels import DeviceLabels
from mlcd.clustering.nearest import CenterScan
from mlcd.errors import Unavailable
from mlcd.types import unit_rows

DIMENSION = 48
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
        ],
    ),
]


def drawn(num, seed=0):
    rows = np.random.default_rng(seed).standard_normal((num, DIMENSION))
    return unit_rows(rows.astype(np.float32))


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    monkeypatch.setattr(device_labels, "LEAST_COMPONENTS", 0)
    return request.param


@pytest.mark.parametrize("num_centers", [9, 1003, 12_000])
def test_every_batch_and_number_of_labels_gives_the_ids_of_the_cpu(num_centers, device):
    centers, rows = drawn(num_centers), drawn(300, seed=1)
    labels, plain = DeviceLabels(centers, device), CenterScan(centers, matmul="numpy")
    for num, top in ((0, 1), (1, 1), (3, 8), (33, 5), (300, min(40, num_centers)), (3, 8)):
        ids = labels.nearest(rows[:num], top)
        assert (ids.dtype, ids.shape) == (np.int32, (num, top))
        assert np.array_equal(ids, plain.nearest(rows[:num], top).ids)


def test_a_row_of_an_earlier_batch_changes_no_other(device):
    centers, rows = drawn(1003), drawn(7, seed=1)
    labels = DeviceLabels(centers, device)
    alone = labels.nearest(rows[:3], 8)
    labels.nearest(np.full((256, DIMENSION), 1e30, np.float32), 8)
    assert np.array_equal(labels.nearest(rows[:3], 8), alone)


def test_ties_are_left_open_and_other_rows_are_not(device):
    centers, rows = drawn(1003), drawn(20, seed=1)
    centers[::3] = centers[0]  # more copies than any room holds
    rows[4] = centers[0]
    rows[11] = 0
    ids = DeviceLabels(centers, device).nearest(rows, 8)
    is_open = (ids == -1).all(axis=1)
    assert is_open[[4, 11]].all()
    plain = CenterScan(centers, matmul="numpy").nearest(rows, 8).ids
    assert np.array_equal(ids[~is_open], plain[~is_open])
    assert is_open.sum() < 15


def test_a_row_that_the_first_room_leaves_open_gets_more(device):
    """The centers of a family are nearer to each other than bfloat16 tells."""
    centers = unit_rows(np.repeat(drawn(40), 300, axis=0) + 1e-4 * drawn(12_000, seed=1))
    rows = unit_rows(centers[::97] + 0.3 * drawn(len(centers[::97]), seed=2))
    labels = DeviceLabels(centers, device)
    first = labels._scan.propose
    with torch.inference_mode():
        _, proven = first(torch.tensor(rows).to(device), 8, labels._scan.rooms[0])
    ids = labels.nearest(rows, 8)
    is_open = (ids == -1).all(axis=1)
    assert is_open.sum() < (~proven).sum().item()
    assert np.array_equal(ids[~is_open], CenterScan(centers).nearest(rows, 8).ids[~is_open])


@pytest.mark.parametrize(
    ("num_centers", "free_gib", "reason"),
    [
        (1000, 100, "1000 centers are few"),
        (100_000, 3, "100000 centers need 3.0 GiB of the GPU's memory, and 3.0 are free"),
    ],
)
def test_centers_that_are_few_or_do_not_fit_are_refused(num_centers, free_gib, reason, monkeypatch):
    monkeypatch.setattr(device_labels, "cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_gib << 30, 140 << 30))
    with pytest.raises(Unavailable, match=reason):
        DeviceLabels(drawn(num_centers))


def test_a_gpu_without_bfloat16_is_refused(monkeypatch):
    monkeypatch.setattr(device_labels, "cuda_available", lambda: False)
    with pytest.raises(Unavailable, match="cannot multiply bfloat16"):
        DeviceLabels(drawn(100_000))
