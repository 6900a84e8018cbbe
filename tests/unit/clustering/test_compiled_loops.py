import subprocess
import sys

import numpy as np
import pytest

from mlcd.clustering import compiled_loops, int8_matmul
from mlcd.clustering.int8_matmul import EightBitRows

pytestmark = pytest.mark.plain_cpu


@pytest.mark.parametrize("shape", [(1, 1), (7, 15), (20, 300)])
@pytest.mark.parametrize("levels", [63, 127])
def test_rows_are_rounded_as_numpy_rounds_them(shape, levels):
    random = np.random.default_rng(0)
    rows = random.standard_normal(shape).astype(np.float32)
    rows[0] = 0
    shift = random.standard_normal(shape[1]).astype(np.float32) * np.float32(0.1)
    by_numpy, by_loops = (EightBitRows.unwritten(*shape) for _ in range(2))
    int8_matmul.round_in_numpy(rows, shift, levels, by_numpy)
    compiled_loops.round_rows(rows, shift, levels, by_loops)
    numbers = by_loops.unsigned.astype(int) - levels - 1
    assert abs(numbers).max() <= levels
    assert (abs(by_loops.unsigned.astype(int) - by_numpy.unsigned) <= 1).all()
    assert (by_loops.scales == by_numpy.scales).all()
    rest = (rows - shift).astype(np.float64) - numbers * by_loops.scales[:, None].astype(np.float64)
    assert by_loops.squared_errors == pytest.approx((rest**2).sum(axis=1), rel=1e-4, abs=1e-12)
    assert by_loops.squares == pytest.approx((numbers**2).sum(axis=1), rel=1e-5)
    offsets = rows.astype(np.float64) @ shift.astype(np.float64)
    assert by_loops.offsets == pytest.approx(offsets, rel=1e-4, abs=1e-5)
    assert by_numpy.offsets == pytest.approx(offsets, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("num", [1, 8, 39, 40])
def test_as_many_values_are_reached_as_are_asked_for_and_few_more(num):
    random = np.random.default_rng(num)
    for _ in range(50):
        values = random.standard_normal(40).astype(np.float32)
        num_reaching = (values >= compiled_loops._bisect_threshold(values, num)).sum()
        assert num <= num_reaching <= num + 1


@pytest.mark.parametrize("values", [[2.0] * 9, [0.0] * 5 + [1e30] * 4, [-1.0] * 8 + [-2.0]])
def test_equal_values_are_reached_together(values):
    values = np.array(values, dtype=np.float32)
    assert (values >= compiled_loops._bisect_threshold(values, 8)).sum() >= 8


def test_fewer_values_than_are_asked_for_reach_anything():
    assert compiled_loops._bisect_threshold(np.ones(7, dtype=np.float32), 8) == -np.inf


@pytest.mark.parametrize("num", [0, 1, 3, 4, 5, 30])
def test_the_best_are_kept_in_order_whatever_order_they_come_in(num):
    random = np.random.default_rng(num)
    for _ in range(50):
        ids, scores = np.full(4, -1), np.full(4, -np.inf)
        come = [(center, float(random.integers(-3, 3))) for center in random.permutation(num)]
        for place, (center, score) in enumerate(come):
            compiled_loops._insert(ids, scores, place, center, score)
        best = sorted(come, key=lambda each: (-each[1], each[0]))[:4]
        assert list(zip(ids, scores, strict=True))[: len(best)] == best
        assert (ids[len(best) :] == -1).all()


def test_machine_code_that_cannot_be_kept_is_made_for_the_process(monkeypatch):
    def refusing(function, *, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return function, options

    monkeypatch.setattr(compiled_loops.numba, "njit", refusing)
    function, options = compiled_loops._compiled_once(len)
    assert function is len
    assert options == compiled_loops._OPTIONS


def test_the_core_is_imported_without_numba():
    asked = "import sys, mlcd.clustering.nearest, mlcd.clustering.int8_matmul as m; m.Int8Matmul"
    asked += "; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", asked], check=True)
