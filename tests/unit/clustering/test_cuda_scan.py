"""The exact scan and k-means where a GPU multiplies: the answers are those of the CPU, bit for
bit.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mlcd.clustering import kmeans as kmeans_module
from mlcd.clustering.device_members import DeviceMembers
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import CenterScan
from mlcd.types import unit_rows

ON_GPU = "cuda-bf16"
DIMENSION, TOP, NUM_ROWS = 96, 8, 3000
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def drawn(num, seed=0):
    return unit_rows(np.random.default_rng(seed).standard_normal((num, DIMENSION)))


def families():
    """Draws groups of 32 centers that bfloat16 hardly tells apart, and rows near them."""
    centers = unit_rows(np.repeat(drawn(320), 32, axis=0) + 0.02 * drawn(320 * 32, seed=1))
    chosen = np.random.default_rng(2).integers(0, len(centers), NUM_ROWS)
    return unit_rows(centers[chosen] + 0.3 * drawn(NUM_ROWS, seed=3)), centers


DATA = {
    "random": lambda: (drawn(NUM_ROWS, seed=1), drawn(10_000)),
    "one row": lambda: (drawn(1, seed=1), drawn(10_000)),
    "families": families,
    "fewer centers than a block": lambda: (drawn(NUM_ROWS, seed=1), drawn(37)),
    "as few centers as are asked for": lambda: (drawn(50, seed=1), drawn(TOP)),
}


def brute_force(rows, centers):
    """Returns the ids by float64 score descending, then id ascending."""
    scores = rows.astype(np.float64) @ centers.astype(np.float64).T
    return np.argsort(-scores, axis=1, kind="stable")[:, :TOP]


@pytest.mark.parametrize("name", DATA)
def test_a_gpu_finds_the_ids_of_float64_and_the_very_scores_of_the_cpu(name):
    rows, centers = DATA[name]()
    found = CenterScan(centers, matmul=ON_GPU).nearest(rows, TOP)
    assert found.scan.products == "bf16 cuda"
    plain = CenterScan(centers, matmul="numpy").nearest(rows, TOP)
    assert np.array_equal(found.ids, brute_force(rows, centers))
    assert np.array_equal(found.ids, plain.ids)
    assert np.array_equal(found.scores, plain.scores)


def test_of_equal_centers_the_lower_ids_come_first_on_a_gpu():
    """The 20 copies of each are thousands of ids apart, in other blocks."""
    rows, distinct = drawn(500, seed=1), drawn(600)
    centers = np.tile(distinct, (20, 1))
    scores = np.tile(rows.astype(np.float64) @ distinct.astype(np.float64).T, (1, 20))
    found = CenterScan(centers, matmul=ON_GPU).nearest(rows, TOP)
    plain = CenterScan(centers, matmul="numpy").nearest(rows, TOP)
    assert np.array_equal(found.ids, np.argsort(-scores, axis=1, kind="stable")[:, :TOP])
    assert np.array_equal(found.scores, plain.scores)


def test_one_scan_on_a_gpu_serves_several_threads():
    rows, centers = families()
    scan, expected = CenterScan(centers, matmul=ON_GPU), brute_force(rows, centers)
    parts = [slice(start, start + size) for size in (1, 100, 700) for start in (0, 300, 2000)]
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda part: scan.nearest(rows[part], TOP).ids, 4 * parts))
    for part, ids in zip(4 * parts, answers, strict=True):
        assert np.array_equal(ids, expected[part]), part


@pytest.mark.parametrize("room", [None, 0, 8192 * 4 * DIMENSION])
def test_kmeans_on_a_gpu_is_that_of_the_cpu_bit_for_bit(room, monkeypatch):
    rows = unit_rows(np.repeat(drawn(60), 400, axis=0) + 0.8 * drawn(24_000, seed=1))
    with monkeypatch.context() as patch:
        patch.setattr(kmeans_module, "fastest_matmuls", lambda *_, **__: ["numpy"])
        plain = kmeans([rows], 100, iterations=6, tolerance=0.0)
    passes, assign = [], DeviceMembers.assign
    monkeypatch.setattr(
        DeviceMembers, "assign", lambda *args: passes.append(assign(*args)) or passes[-1]
    )
    monkeypatch.setattr(kmeans_module, "_ROWS_ON_DEVICE", room)
    monkeypatch.setattr(kmeans_module, "_MANY_CENTERS", 1)
    monkeypatch.setattr(kmeans_module, "fastest_matmuls", lambda *_, **__: [ON_GPU])
    result = kmeans([rows], 100, iterations=6, tolerance=0.0)
    assert len(passes) == len(result.objective)
    assert np.array_equal(result.centers, plain.centers)
    assert np.array_equal(result.assignment, plain.assignment)
    assert result.objective == plain.objective
