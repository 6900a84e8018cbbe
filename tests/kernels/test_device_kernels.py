"""The kernels of a GPU's scan, run on the CPU by the interpreter of their language, against float64.

Rows and centers are float16: the interpreter has no product of bfloat16. What only a GPU can tell,
such as whether its memory has room for a block, is asked by tests/unit/clustering/test_cuda_scan.py.
"""

import os

import pytest
import torch

from mlcd.clustering.device_products import GROUP, TILE

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="make test-kernels runs these"
)
ALLOWED = 1e-4  # of float32 sums of some hundred products of about one


@pytest.fixture
def kernels():
    from mlcd.clustering import device_kernels

    return device_kernels


def drawn(num, dimension, seed=0):
    return torch.randn((num, dimension), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dimension", [64, 192])
@pytest.mark.parametrize("num_centers", [GROUP, TILE, 3 * TILE + 2 * GROUP])
@pytest.mark.parametrize("num_rows", [1, 7, 129, 1200])
def test_maxima_are_those_of_every_group_and_tile(kernels, num_rows, num_centers, dimension):
    """1,200 rows are more blocks than share a tile of centers in the cache."""
    rows, centers = drawn(num_rows, dimension).half(), drawn(num_centers, dimension, seed=1).half()
    num_tiles = -(-num_centers // TILE)
    groups = torch.full((num_rows, num_tiles * TILE // GROUP), torch.nan)
    tiles = torch.full((num_rows, num_tiles), torch.nan)
    kernels.maxima(rows, centers, groups, tiles, GROUP)
    exact = rows.double() @ centers.double().T
    expected = exact.unflatten(1, (-1, GROUP)).amax(dim=2)
    num_groups = num_centers // GROUP
    assert (groups[:, :num_groups].double() - expected).abs().max() < ALLOWED
    assert (groups[:, num_groups:] == -torch.inf).all()
    assert torch.equal(tiles, groups.unflatten(1, (num_tiles, -1)).amax(dim=2))


@pytest.mark.parametrize("dimension", [64, 320])
def test_members_of_chosen_groups_are_multiplied_and_no_others(kernels, dimension):
    rows, centers = drawn(5, dimension).half(), drawn(40 * GROUP, dimension, seed=1).half()
    chosen = torch.randint(-1, 40, (5, 6), generator=torch.Generator().manual_seed(2))
    chosen[0, 0], chosen[1, 1] = -1, 39
    products = torch.full((5, 6, GROUP), torch.nan)
    kernels.of_members(rows, centers, chosen, products)
    exact = (rows.double() @ centers.double().T).unflatten(1, (-1, GROUP))
    expected = exact.gather(1, chosen.clamp_min(0)[:, :, None].expand(-1, -1, GROUP))
    absent = chosen < 0
    assert (products[absent] == -torch.inf).all()
    assert (products[~absent].double() - expected[~absent]).abs().max() < ALLOWED


@pytest.mark.parametrize("dimension", [33, 64, 768])
def test_scores_of_chosen_centers_are_those_of_float64(kernels, dimension):
    rows, centers = drawn(5, dimension), drawn(50, dimension, seed=1)
    chosen = torch.randint(0, 50, (5, 9), generator=torch.Generator().manual_seed(2))
    chosen[::2, 3] = -1
    scores = torch.full((5, 9), torch.nan, dtype=torch.float64)
    kernels.in_float64(rows, centers, chosen, scores)
    expected = (rows.double() @ centers.double().T).gather(1, chosen.clamp_min(0))
    expected[chosen < 0] = -torch.inf
    assert torch.allclose(scores, expected, rtol=0, atol=1e-12)
