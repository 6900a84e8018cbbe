import numpy as np
import pytest

from mlcd.clustering import compiled_scan
from mlcd.clustering import kmeans as kmeans_module
from mlcd.clustering.arithmetics import DEVICE
from mlcd.clustering.kmeans import assign, kmeans
from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.rows import ArrayRows
from mlcd.types import unit_rows

pytestmark = pytest.mark.plain_cpu

EIGHT_BITS, COMPILED = "torch int8 cpu", "torch int8 cpu, compiled"


def drawn_rows(power=0.0):
    weights = (1.0 + np.arange(160)) ** -power
    random = np.random.default_rng(0)
    means = np.repeat(random.standard_normal((60, 160)), 100, axis=0)
    return unit_rows((means + 0.8 * random.standard_normal((6000, 160))) * weights)


@pytest.fixture
def products(monkeypatch):
    """Makes compiled loops worth it and the first centers rows; returns the products of the scans
    that are asked.
    """
    asked, by_scan = [], kmeans_module._by_scan

    def noted(scan, rows):
        asked.append(scan.products)
        return by_scan(scan, rows)

    monkeypatch.setattr(kmeans_module, "_by_scan", noted)
    monkeypatch.setattr(kmeans_module, "_SEVERAL_CLUSTERS", np.inf)
    monkeypatch.setattr(kmeans_module, "WORTH_COMPILING", 0)
    monkeypatch.setattr(kmeans_module, "fastest_matmuls", lambda *_, **__: ["torch-int8", "numpy"])
    return asked


@pytest.fixture
def without_loops(monkeypatch):
    monkeypatch.setattr(CenterScan, "compiled", None)
    monkeypatch.setattr(kmeans_module, "_MANY_CENTERS", 1)


@pytest.mark.parametrize("power", [0.0, 2.0])
@pytest.mark.parametrize("with_heads", [False, True])
def test_every_way_finds_the_same_clusters(power, with_heads, products, monkeypatch):
    rows = drawn_rows(power)
    monkeypatch.setattr(kmeans_module, "_MANY_ROWS", 1 if with_heads else np.inf)
    by_scan, num_rows = kmeans_module._by_scan, []
    monkeypatch.setattr(
        kmeans_module, "_by_scan", lambda *args: num_rows.append(len(args[1])) or by_scan(*args)
    )
    found = kmeans([rows], 200, iterations=4, tolerance=0.0)
    if not with_heads:
        assert products == [COMPILED] * 5
    elif power:
        assert sum(num_rows) < len(rows)  # of five times as many, as heads rule most centers out
    products.clear()
    monkeypatch.setattr(kmeans_module, "WORTH_COMPILING", np.inf)
    monkeypatch.setattr(kmeans_module, "_MANY_ROWS", np.inf)
    plain = kmeans([rows], 200, iterations=4, tolerance=0.0)
    assert products == []
    assert np.array_equal(found.centers, plain.centers)
    assert np.array_equal(found.assignment, plain.assignment)
    assert found.objective == plain.objective


def test_loops_that_fail_are_done_without(products, monkeypatch, caplog):
    def failing(scan):
        raise ImportError("numba needs another numpy")

    monkeypatch.setattr(compiled_scan, "CompiledScan", failing)
    kmeans([drawn_rows()], 100, iterations=3, tolerance=0.0)
    assert products == [EIGHT_BITS] * 4
    assert "numba needs another numpy" in caplog.text


def test_the_loops_are_not_loaded_for_a_single_pass(products, monkeypatch):
    monkeypatch.setattr(CenterScan, "compiled", None)
    rows = drawn_rows()
    assign(ArrayRows([rows]), rows[:100], None)
    assert products == []


def test_a_scan_is_plain_without_numba(products, without_loops, monkeypatch):
    monkeypatch.setattr(kmeans_module, "find_spec", lambda _: None)
    kmeans([drawn_rows()], 100, iterations=3, tolerance=0.0)
    assert products == [EIGHT_BITS] * 4


def test_the_loops_are_not_loaded_for_little_work(products, without_loops, monkeypatch):
    monkeypatch.setattr(kmeans_module, "WORTH_COMPILING", 6000 * 100 * 160 * 5 + 1)
    kmeans([drawn_rows()], 100, iterations=4, tolerance=0.0)
    assert products == [EIGHT_BITS] * 5


def test_without_torch_all_centers_are_multiplied_in_float32(products, monkeypatch):
    monkeypatch.setattr(kmeans_module, "fastest_matmuls", lambda *_, **__: ["numpy"])
    kmeans([drawn_rows()], 100, iterations=3, tolerance=0.0)
    assert products == []


def test_a_gpu_needs_neither_loops_nor_heads(products, without_loops, monkeypatch):
    monkeypatch.setattr(kmeans_module, "fastest_matmuls", lambda *_, **__: [DEVICE, "numpy"])
    monkeypatch.setattr(kmeans_module, "_DEVICE", "cpu")
    monkeypatch.setattr(kmeans_module, "NearestCenter", None)
    kmeans([drawn_rows()], 100, iterations=3, tolerance=0.0)
    assert products == []  # rows stay on the device


def test_passes_that_are_done_do_not_count(products, monkeypatch):
    rows, states = drawn_rows(), []
    monkeypatch.setattr(kmeans_module, "WORTH_COMPILING", 6000 * 100 * 160 * 5)
    kmeans([rows], 100, iterations=4, tolerance=0.0, on_start=states.append)
    assert products == [COMPILED] * 5
    products.clear()
    kmeans([rows], 100, iterations=4, tolerance=0.0, start=states[1])
    assert products == []
