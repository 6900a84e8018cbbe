"""Known values, the definitions, and the losses of open_clip (distributed:
test_partial_fc, test_pairs).
"""

import math

import pytest
import torch

from mlcd.losses import contrastive
from mlcd.losses.contrastive import clip_loss, siglip_loss
from tests.open_clip_files import open_clip_module

DOUBLE = {"dtype": torch.float64}


def scalar(value):
    return torch.tensor(value, **DOUBLE)


def test_known_values():
    pair = torch.eye(2, **DOUBLE)
    assert clip_loss(pair, pair, scalar(1 / 0.07)).item() == pytest.approx(
        6.248747557e-07, rel=1e-9
    )
    assert siglip_loss(pair, pair, scalar(10.0), scalar(-10.0)).item() == pytest.approx(
        0.693192579459, abs=1e-12
    )
    for num, value in ((512, 10.023244236399), (4096, None)):
        images, texts = torch.zeros((num, 2), **DOUBLE), torch.zeros((num, 2), **DOUBLE)
        assert clip_loss(images, texts, scalar(1.0)).item() == pytest.approx(
            math.log(num), abs=1e-12
        )
        if value is not None:
            assert siglip_loss(images, texts, scalar(10.0), scalar(-10.0)).item() == pytest.approx(
                value, abs=1e-9
            )


def random_pairs(num=7, dimension=5):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((2, num, dimension), generator=generator, **DOUBLE)
    return torch.nn.functional.normalize(rows, dim=2)


def test_gradients():
    images, texts = (rows.clone().requires_grad_() for rows in random_pairs(4, 3))
    scale, bias = scalar(3.0).requires_grad_(), scalar(-1.0).requires_grad_()
    assert torch.autograd.gradcheck(clip_loss, (images, texts, scale))
    assert torch.autograd.gradcheck(siglip_loss, (images, texts, scale, bias))


@pytest.mark.parametrize("loss", [clip_loss, siglip_loss])
def test_chunks_of_rows_equal_the_whole(loss, monkeypatch):
    def gradients():
        images, texts = (rows.clone().requires_grad_() for rows in random_pairs())
        scalars = [scalar(3.0).requires_grad_(), scalar(-1.0).requires_grad_()]
        inputs = [images, texts, *scalars[: 1 + (loss is siglip_loss)]]
        value = loss(*inputs)
        return value, *torch.autograd.grad(value, inputs)

    whole = gradients()
    seen = []
    monkeypatch.setattr(contrastive, "CHUNK_ENTRIES", 3 * 7)
    for name in ("_softmax_losses", "_sigmoid_losses"):
        original = getattr(contrastive, name)
        counted = lambda rows, *rest, of=original: (seen.append(len(rows)), of(rows, *rest))[1]  # noqa: E731
        monkeypatch.setattr(contrastive, name, counted)
    for one, other in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert max(seen) == 3


def test_half_precision_is_computed_in_float32():
    images, texts = random_pairs()
    half = clip_loss(images.bfloat16(), texts.bfloat16(), torch.tensor(10.0))
    assert half.dtype == torch.float32
    exact = clip_loss(images.bfloat16().double(), texts.bfloat16().double(), scalar(10.0))
    assert half.item() == pytest.approx(exact.item(), rel=1e-5)


def gradients_of(loss, images, texts, *scalars):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (images, texts, *scalars)]
    value = loss(*leaves)
    return value.item(), torch.autograd.grad(value, leaves)


@pytest.mark.parametrize(
    ("loss", "theirs", "scalars"),
    [(clip_loss, "ClipLoss", (9.0,)), (siglip_loss, "SigLipLoss", (9.0, -4.0))],
)
def test_values_and_gradients_equal_open_clip_s(loss, theirs, scalars):
    arguments = (*random_pairs(), *map(scalar, scalars))
    ours = gradients_of(loss, *arguments)
    expected = gradients_of(getattr(open_clip_module("loss"), theirs)(), *arguments)
    assert ours[0] == pytest.approx(expected[0], abs=1e-12)
    for mine, other in zip(ours[1], expected[1], strict=True):
        assert torch.allclose(mine, other, atol=1e-12)
