import numpy as np
import pytest

from mlcd.clustering import compiled_scan
from mlcd.clustering import kmeans as kmeans_module
from mlcd.clustering.arithmetics import DEVICE
from mlcd.clustering.kmeans import assigned, kmeans
from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.nearest_center import NearestCenter
from mlcd.clustering.rows import ArrayRows
from mlcd.types import unit_rows

pytestmark = pytest.mark.plain_cpu


def drawn_rows():
    random = np.random.default_rng(0)
    means = np.repeat(random.standard_normal((60, 48)), 100, axis=0)
    return unit_rows(means + 0.8 * random.standard_normal((6000, 48)))


@pytest.fixture
def tried(monkeypatch):
    """Makes compiled loops worth it and the fastest way; the ways of each pass that were tried."""
    names, fastest = [], kmeans_module._Fastest

    def noted(one, ways, chosen):
        names.append(list(ways))
        return fastest(one, dict(reversed(ways.items())), chosen)

    monkeypatch.setattr(kmeans_module, "WORTH_COMPILING", 0)
    monkeypatch.setattr(kmeans_module, "_Fastest", noted)
    monkeypatch.setattr(fastest, "_seconds", staticmethod(lambda *_: 0.0))
    monkeypatch.setattr(kmeans_module, "fastest_matmuls", lambda *_, **__: ["torch-int8", "numpy"])
    return names


def test_compiled_loops_find_the_same_clusters(tried):
    rows = drawn_rows()
    found = kmeans([rows], 100, iterations=4, tolerance=0.0)
    ways, alone = ["nearest_center", "torch-int8"], ["nearest_center", "torch-int8"]
    assert tried == [ways, ways, alone, alone, alone]
    with pytest.MonkeyPatch.context() as without:
        without.setattr(kmeans_module, "WORTH_COMPILING", np.inf)
        plain = kmeans([rows], 100, iterations=4, tolerance=0.0)
    assert tried[-1] == ["nearest_center"]
    assert np.array_equal(found.centers, plain.centers)
    assert np.array_equal(found.assignment, plain.assignment)
    assert found.objective == plain.objective


def test_loops_that_fail_are_not_asked_again(tried, monkeypatch, caplog):
    def failing(scan):
        raise ImportError("numba needs another numpy")

    monkeypatch.setattr(compiled_scan, "CompiledScan", failing)
    kmeans([drawn_rows()], 100, iterations=3, tolerance=0.0)
    assert tried == [["nearest_center", "torch-int8"]] * 4
    assert caplog.text.count("numba needs another numpy") == 1


def test_the_loops_are_not_loaded_for_a_single_pass(tried, monkeypatch):
    monkeypatch.setattr(CenterScan, "compiled", None)
    rows = drawn_rows()
    assigned(ArrayRows([rows]), rows[:100], None)
    assert tried == [["nearest_center"]]


def test_heads_are_not_made_beside_a_scan_that_is_chosen(tried, monkeypatch):
    made = []
    monkeypatch.setattr(kmeans_module, "_MANY_ROWS", 1)
    monkeypatch.setattr(kmeans_module, "_MANY_COMPONENTS", 1)
    monkeypatch.setattr(
        kmeans_module,
        "NearestCenter",
        lambda centers, basis, one_in: made.append(basis) or NearestCenter(centers, basis, one_in),
    )
    kmeans([drawn_rows()], 100, iterations=3, tolerance=0.0)
    assert [basis is None for basis in made] == [False, False, True, True]


def test_a_scan_is_plain_without_numba(tried, monkeypatch):
    monkeypatch.setattr(kmeans_module, "find_spec", lambda _: None)
    monkeypatch.setattr(kmeans_module, "_MANY_CENTERS", 1)
    monkeypatch.setattr(CenterScan, "compiled", None)
    kmeans([drawn_rows()], 100, iterations=3, tolerance=0.0)
    assert tried == [["nearest_center", "torch-int8"]] * 4


def test_the_loops_are_not_loaded_for_little_work(tried, monkeypatch):
    monkeypatch.setattr(CenterScan, "compiled", None)
    monkeypatch.setattr(kmeans_module, "WORTH_COMPILING", 6000 * 100 * 48 * 5 + 1)
    monkeypatch.setattr(kmeans_module, "_MANY_CENTERS", 1)
    kmeans([drawn_rows()], 100, iterations=4, tolerance=0.0)
    assert {way for ways in tried for way in ways} == {"nearest_center", "torch-int8"}


def test_a_gpu_needs_no_loops(tried, monkeypatch):
    monkeypatch.setattr(kmeans_module, "fastest_matmuls", lambda *_, **__: [DEVICE, "numpy"])
    monkeypatch.setattr(CenterScan, "compiled", None)
    monkeypatch.setattr(kmeans_module, "_plain_scan", lambda centers, **_: CenterScan(centers))
    kmeans([drawn_rows()], 100, iterations=3, tolerance=0.0)
    assert tried == [["nearest_center", DEVICE]] * 4


def test_passes_that_are_done_do_not_count(tried, monkeypatch):
    rows, states = drawn_rows(), []
    monkeypatch.setattr(kmeans_module, "WORTH_COMPILING", 6000 * 100 * 48 * 5)
    kmeans([rows], 100, iterations=4, tolerance=0.0, on_start=states.append)
    assert "torch-int8" in tried[0]
    tried.clear()
    kmeans([rows], 100, iterations=4, tolerance=0.0, start=states[1])
    assert tried == [["nearest_center"]] * 4
