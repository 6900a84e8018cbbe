import numpy as np
import pytest

from mlcd.clustering.arithmetics import open_matmul
from mlcd.clustering.matmul import entries_above, reached_by
from mlcd.types import unit_rows

pytestmark = pytest.mark.plain_cpu

ROWS = unit_rows(np.random.default_rng(0).standard_normal((9, 16)))
CENTERS = unit_rows(
    np.random.default_rng(1).standard_normal((200, 16))
)  # three groups of 64, and a bit


@pytest.fixture(params=["numpy", "torch-int8"])
def matmul(request):
    return open_matmul(request.param, CENTERS)


@pytest.fixture
def product(matmul):
    return matmul.multiply(matmul.load(ROWS).data, 0, len(CENTERS))


@pytest.mark.parametrize(
    "threshold", [-np.inf, -0.4, -1e-30, -0.0, 0.0, 1e-30, 0.3, 2.0, "a product", "mixed"]
)
def test_hits_are_all_products_above_the_threshold(product, threshold):
    thresholds = np.full(
        len(ROWS), 0.1 if isinstance(threshold, str) else threshold, dtype=np.float32
    )
    if threshold == "a product":
        thresholds = product[:, 77].copy()
    elif threshold == "mixed":
        thresholds[::2] = -0.2
    hits = entries_above(product, thresholds)
    expected = np.nonzero(product > thresholds[:, None])
    assert [found.tolist() for found in hits] == [found.tolist() for found in expected]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("k", [1, 3, 6, 7, 200])
def test_as_many_products_reach_a_value_as_are_asked_for_and_few_more(matmul, k, sign):
    product = matmul.multiply(matmul.load(sign * np.abs(ROWS)).data, 0, len(CENTERS))
    num_reaching = (product >= reached_by(product, k)[:, None]).sum(axis=1)
    assert (num_reaching >= k).all()
    assert num_reaching.mean() <= 2 * k + 1


def test_sums_make_the_products(matmul, product):
    sums = matmul.sums(matmul.load(ROWS).data, 0, len(CENTERS))
    assert sums.values.shape[1] >= len(CENTERS)
    assert sums.products() == pytest.approx(product, rel=1e-6, abs=1e-7)
