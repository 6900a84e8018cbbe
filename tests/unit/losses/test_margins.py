import math

import pytest
import torch

from mlcd.losses.margins import with_margin


def test_values_are_those_of_the_definitions():
    cosines = torch.linspace(-0.9, 0.99, 50, dtype=torch.float64)
    assert torch.allclose(with_margin(cosines), torch.cos(torch.arccos(cosines) + 0.3), atol=1e-12)
    assert torch.allclose(with_margin(cosines, kind="cosface"), cosines - 0.3)
    assert with_margin(cosines, kind="none") is cosines


@pytest.mark.parametrize("grad", ["exact", "straight_through"])
def test_it_is_monotone_and_finite_from_minus_one_to_one(grad):
    cosines = torch.linspace(-1, 1, 2001, dtype=torch.float64, requires_grad=True)
    lowered = with_margin(cosines, grad=grad)
    assert (lowered.diff() > 0).all()
    lowered.sum().backward()
    assert torch.isfinite(cosines.grad).all()
    assert (cosines.grad > 0).all()


def test_both_gradients_are_what_they_say():
    for degrees, factor in ((90, 0.955), (60, 1.126), (45, 1.251), (20, 1.767)):
        cosine = torch.tensor(
            math.cos(math.radians(degrees)), dtype=torch.float64, requires_grad=True
        )
        with_margin(cosine, grad="exact").backward()
        assert float(cosine.grad) == pytest.approx(factor, abs=1e-3)
        cosine.grad = None
        with_margin(cosine).backward()
        assert float(cosine.grad) == 1.0
