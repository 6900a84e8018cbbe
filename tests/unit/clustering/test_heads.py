import numpy as np
import pytest

from mlcd.clustering.heads import Heads, main_directions
from mlcd.types import unit_rows

pytestmark = pytest.mark.plain_cpu


def decaying(num, dimension, seed):
    weights = 1 / (1.0 + np.arange(dimension))
    return unit_rows(np.random.default_rng(seed).standard_normal((num, dimension)) * weights)


def cases():
    rows, centers = decaying(200, 96, 0), decaying(300, 96, 1)
    cone = 30 * np.eye(96, dtype=np.float32)[:1]
    yield "unit", rows, centers
    yield "long and short", rows * np.geomspace(1e-12, 1e12, 200)[:, None], centers * 1e3
    yield "in a narrow cone", unit_rows(rows + cone), unit_rows(centers + cone)
    yield "opposite", rows, -rows
    yield "zero", rows * 0, centers
    yield "tiny", rows * 1e-20, centers * 1e-20


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("num", [1, 12, 95])
@pytest.mark.parametrize(
    ("rows", "centers"), [pytest.param(*case[1:], id=case[0]) for case in cases()]
)
def test_products_of_heads_bound_the_scores(rows, centers, num, skewed):
    rows, centers = rows.astype(np.float32), centers.astype(np.float32)
    directions = main_directions(centers, num)
    if skewed:  # far from orthonormal: the bound says less, and holds
        directions = directions + np.float32(1e-3) * decaying(96, num, 2)
    heads = Heads(directions)
    exact = rows.astype(np.float64) @ centers.astype(np.float64).T
    products = heads.of(rows).astype(np.float64) @ heads.of(centers).astype(np.float64).T
    lengths = [np.linalg.norm(each.astype(np.float64), axis=1) for each in (rows, centers)]
    assert (exact <= products + heads.slack * np.outer(*lengths)).all()


def test_the_bound_is_close_where_few_directions_hold_most():
    rows, centers = decaying(200, 96, 0), decaying(300, 96, 1)
    heads = Heads(main_directions(centers, 24))
    over = heads.of(rows) @ heads.of(centers).T - rows @ centers.T
    assert 0 < over.mean() < 0.05
    assert heads.slack < 1e-4


@pytest.mark.parametrize("longer", [0.999, 1.0, 1.001])
def test_tails_are_not_too_short(longer):
    rows = decaying(200, 96, 0)
    directions = main_directions(decaying(300, 96, 1), 24)
    nearest, _ = np.linalg.qr(directions.astype(np.float64))
    exact = rows - rows.astype(np.float64) @ nearest @ nearest.T
    tails = Heads(directions * np.float32(longer)).of(rows)[:, -1]
    assert (tails >= np.linalg.norm(exact, axis=1)).all()
