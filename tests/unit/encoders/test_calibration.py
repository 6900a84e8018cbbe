import numpy as np
import pytest

from mlcd.encoders.text_encoder import Calibration

COSINES = np.array([[0.3, 0.2, 0.25], [-1, 1, 0]], np.float32)


def test_without_a_bias_the_texts_of_an_image_compete():
    found = Calibration(100.0).probabilities(COSINES)
    assert found.dtype == np.float32
    assert found.sum(axis=1) == pytest.approx(1)
    weights = np.exp(100 * COSINES[0].astype(float))
    assert found[0] == pytest.approx(weights / weights.sum())
    assert found[1].tolist() == [0, 1, pytest.approx(0, abs=1e-30)]


def test_with_a_bias_each_pair_is_judged_alone():
    found = Calibration(10.0, -3.0).probabilities(COSINES)
    assert found == pytest.approx(1 / (1 + np.exp(3 - 10 * COSINES.astype(float))))


def test_no_number_overflows_and_nothing_has_no_probability():
    for bias in (None, 0.0, -1e6, 1e6):
        with np.errstate(all="raise", under="ignore"):
            assert np.isfinite(Calibration(1e5, bias).probabilities(COSINES)).all()
            assert Calibration(1.0, bias).probabilities(COSINES[:0]).shape == (0, 3)
