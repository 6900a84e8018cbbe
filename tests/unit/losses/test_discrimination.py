"""Known values of the method reference (float64), an independent autograd form, identities and
extremes.
"""

import math

import pytest
import torch

from mlcd.losses.discrimination import cd_loss, log_sums, mlc_loss, mlcd_loss
from mlcd.losses.margins import with_margin

POSITIVE = torch.tensor([[0.5, 0.2]], dtype=torch.float64)
NEGATIVE = torch.tensor([[0.1, -0.3, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("scale", "kind", "lse_positive", "lse_negative", "mlc", "mlcd", "cd"),
    [
        (1, "none", 0.354355244469, 1.045910683342, 1.620630738534, 2.232970140795, 1.002901240811),
        (
            64,
            "arcface",
            6.302860044504,
            6.401660178422,
            12.704523260286,
            12.708007035734,
            4.138851574470e-04,
        ),
        (
            64,
            "cosface",
            6.400000004587,
            6.401660178422,
            12.801662939198,
            12.804977788204,
            1.662934603259e-03,
        ),
        (
            64,
            "none",
            -12.799999995413,
            6.401660178422,
            1.662934610881e-03,
            6.403320365980,
            7.634529360e-12,
        ),
    ],
)
def test_known_values(scale, kind, lse_positive, lse_negative, mlc, mlcd, cd):
    positive, negative = scale * with_margin(POSITIVE, kind=kind), scale * NEGATIVE
    assert [x.item() for x in log_sums(positive, negative)] == pytest.approx(
        [lse_positive, lse_negative], abs=1e-9
    )
    assert float(mlc_loss(positive, negative)) == pytest.approx(mlc, abs=1e-9)
    assert float(mlcd_loss(positive, negative)) == pytest.approx(mlcd, abs=1e-9)
    assert float(cd_loss(positive[:, :1], negative)) == pytest.approx(cd, abs=1e-9)


def brute_force(positive, negative):
    """Eq. 5 as printed, by a double loop over pairs; -inf entries are left out."""
    losses = []
    for positives, negatives in zip(positive.tolist(), negative.tolist(), strict=True):
        p, n = ([x for x in logits if x != -math.inf] for logits in (positives, negatives))
        pairs = sum(math.exp(j - i) for i in p for j in n)
        losses.append(
            math.log(1 + pairs + sum(math.exp(j) for j in n) + sum(math.exp(-i) for i in p))
        )
    return losses


def test_random_ragged_cases_equal_the_printed_equation():
    generator = torch.Generator().manual_seed(0)
    positive = torch.randn((50, 6), generator=generator, dtype=torch.float64) * 3
    negative = torch.randn((50, 30), generator=generator, dtype=torch.float64) * 3 - 2
    positive[torch.rand((50, 6), generator=generator) < 0.4] = -math.inf
    negative[torch.rand((50, 30), generator=generator) < 0.4] = -math.inf
    positive[0] = -math.inf
    negative[1] = -math.inf
    got = mlcd_loss(positive, negative, reduction="none").tolist()
    assert got == pytest.approx(brute_force(positive, negative), abs=1e-12)
    assert float(mlcd_loss(positive, negative)) == pytest.approx(sum(got) / 50, abs=1e-12)


def test_gradients_are_right_and_finite_where_entries_are_absent():
    positive = torch.tensor(
        [[0.3, -math.inf], [-math.inf, -math.inf]], dtype=torch.float64, requires_grad=True
    )
    negative = torch.tensor(
        [[0.1, 0.2], [-math.inf, -math.inf]], dtype=torch.float64, requires_grad=True
    )
    for loss in (mlcd_loss, mlc_loss):
        positive.grad = negative.grad = None
        loss(positive, negative).backward()
        assert torch.isfinite(positive.grad).all()
        assert torch.isfinite(negative.grad).all()
        assert positive.grad[1].abs().sum() == negative.grad[1].abs().sum() == 0
        given = (POSITIVE.clone().requires_grad_(), NEGATIVE.clone().requires_grad_())
        assert torch.autograd.gradcheck(loss, given)


def test_identities():
    lse_positive, lse_negative = log_sums(POSITIVE, NEGATIVE)
    p, n = lse_positive.exp(), lse_negative.exp()
    difference = mlcd_loss(POSITIVE, NEGATIVE) - mlc_loss(POSITIVE, NEGATIVE)
    assert float(difference) == pytest.approx(
        float(torch.log((1 + p) * (1 + n) / (1 + p * n))), abs=1e-12
    )
    one = POSITIVE[:, :1]
    assert float(mlc_loss(one, NEGATIVE)) == pytest.approx(float(cd_loss(one, NEGATIVE)), abs=1e-15)
    shifted = mlc_loss(POSITIVE + 2, NEGATIVE + 2)
    assert float(shifted) == pytest.approx(float(mlc_loss(POSITIVE, NEGATIVE)), abs=1e-12)
    assert float(mlcd_loss(POSITIVE, NEGATIVE, bias=2.0)) == pytest.approx(
        float(mlcd_loss(POSITIVE + 2, NEGATIVE + 2)), abs=1e-12
    )


def test_known_values_at_the_extremes():
    """Logits by plain ArcFace, as the reference has them (ours goes on differently beyond pi)."""
    worst = torch.full((1, 8), 64 * math.cos(math.pi + 0.3), dtype=torch.float64)
    loss = mlcd_loss(worst, torch.full((1, 10), 64.0, dtype=torch.float64))
    assert float(loss) == pytest.approx(129.523561938713, abs=1e-9)
    best = torch.full((1, 8), 64 * math.cos(0.3), dtype=torch.float64)
    loss = mlcd_loss(best, torch.full((1, 10), -64.0, dtype=torch.float64))
    assert float(loss) == pytest.approx(2.397343e-26, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("positive", "negative"), [(-1.0, 1.0), (1.0, -1.0)])
def test_extremes_are_finite(dtype, positive, negative):
    cosines = torch.full((1, 8), positive, dtype=dtype, requires_grad=True)
    lowered = 64 * with_margin(cosines, grad="exact")
    loss = mlcd_loss(lowered, torch.full((1, 10), 64 * negative, dtype=dtype))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(cosines.grad).all()


def test_half_precision_input_is_computed_in_float32():
    generator = torch.Generator().manual_seed(0)
    positive = (torch.randn((4, 3), generator=generator) * 20).bfloat16()
    negative = (torch.randn((4, 9), generator=generator) * 20).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = mlcd_loss(positive, negative)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(
        float(mlcd_loss(positive.double(), negative.double())), rel=1e-6
    )


def test_cd_takes_one_positive():
    with pytest.raises(ValueError, match="one positive"):
        cd_loss(POSITIVE, NEGATIVE)
