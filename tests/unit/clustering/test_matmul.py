import numpy as np
import pytest

from mlcd.clustering.arithmetics import open_matmul
from mlcd.clustering.matmul import largest_columns
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


def as_float32(product):
    return product if isinstance(product, np.ndarray) else product.float().numpy()


@pytest.mark.parametrize(
    "threshold", [-np.inf, -0.4, -1e-30, -0.0, 0.0, 1e-30, 0.3, 2.0, "a product", "mixed"]
)
def test_hits_are_all_products_above_the_threshold(matmul, product, threshold):
    values = as_float32(product)
    thresholds = np.full(
        len(ROWS), 0.1 if isinstance(threshold, str) else threshold, dtype=np.float32
    )
    if threshold == "a product":
        thresholds = values[:, 77].copy()
    elif threshold == "mixed":
        thresholds[::2] = -0.2
    hits = matmul.above(product, thresholds)
    rows, columns = np.nonzero(values > thresholds[:, None])
    order = np.lexsort((hits.columns, hits.rows))
    assert hits.rows[order].tolist() == rows.tolist()
    assert hits.columns[order].tolist() == columns.tolist()
    assert hits.scores[order].tolist() == values[rows, columns].tolist()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("k", [1, 3, 6, 7, 200])
def test_as_many_products_reach_a_value_as_are_asked_for_and_few_more(matmul, k, sign):
    product = matmul.multiply(matmul.load(sign * np.abs(ROWS)).data, 0, len(CENTERS))
    num_reaching = (as_float32(product) >= matmul.reached(product, k)[:, None]).sum(axis=1)
    assert (num_reaching >= k).all()
    assert num_reaching.mean() <= 2 * k + 1


def test_sums_make_the_products(matmul, product):
    sums = matmul.sums(matmul.load(ROWS).data, 0, len(CENTERS))
    assert sums.values.shape[1] >= len(CENTERS)
    assert sums.products() == pytest.approx(as_float32(product), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("k", [1, 5, 12])
def test_the_largest_columns_are_those_of_a_stable_sort(k):
    values = np.random.default_rng(0).choice([-np.inf, 0.0, 1.0, 2.0], (50, 12)).astype(np.float32)
    expected = np.sort(np.argsort(-values, axis=1, kind="stable")[:, :k], axis=1)
    assert (largest_columns(values, k) == expected).all()
