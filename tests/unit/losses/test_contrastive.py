"""Known values, transformers' formulas written out, and the scale of the gradients (distributed: test_partial_fc)."""

import math

import pytest
import torch

from mlcd.losses.contrastive import clip_loss, siglip_loss

DOUBLE = {"dtype": torch.float64}


def scalar(value):
    return torch.tensor(value, **DOUBLE)


def test_known_values():
    pair = torch.eye(2, **DOUBLE)
    assert clip_loss(pair, pair, scalar(1 / 0.07)).item() == pytest.approx(6.248747557e-07, rel=1e-9)
    assert siglip_loss(pair, pair, scalar(10.0), scalar(-10.0)).item() == pytest.approx(0.693192579459, abs=1e-12)
    for num, value in ((512, 10.023244236399), (4096, None)):
        images, texts = torch.zeros((num, 2), **DOUBLE), torch.zeros((num, 2), **DOUBLE)
        assert clip_loss(images, texts, scalar(1.0)).item() == pytest.approx(math.log(num), abs=1e-12)
        if value is not None:
            assert siglip_loss(images, texts, scalar(10.0), scalar(-10.0)).item() == pytest.approx(value, abs=1e-9)


def random_pairs(num=7, dimension=5):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((2, num, dimension), generator=generator, **DOUBLE)
    return torch.nn.functional.normalize(rows, dim=2)


def test_clip_equals_eq_1_in_both_directions():
    images, texts = random_pairs()
    expected = 0.0
    for i in range(7):
        for own, others in ((images[i], texts), (texts[i], images)):
            scores = [math.exp(3.0 * float(own @ other)) for other in others]
            expected -= math.log(scores[i] / sum(scores)) / 14
    assert clip_loss(images, texts, scalar(3.0)).item() == pytest.approx(expected, abs=1e-12)


def test_siglip_equals_its_definition():
    images, texts = random_pairs()
    expected = 0.0
    for a in range(7):
        for b in range(7):
            logit = 3.0 * float(images[a] @ texts[b]) - 1.0
            expected += math.log(1 + math.exp(-logit if a == b else logit)) / 7
    assert siglip_loss(images, texts, scalar(3.0), scalar(-1.0)).item() == pytest.approx(expected, abs=1e-12)


def test_gradients():
    images, texts = (rows.clone().requires_grad_() for rows in random_pairs(4, 3))
    scale, bias = scalar(3.0).requires_grad_(), scalar(-1.0).requires_grad_()
    assert torch.autograd.gradcheck(clip_loss, (images, texts, scale))
    assert torch.autograd.gradcheck(siglip_loss, (images, texts, scale, bias))


def test_half_precision_is_computed_in_float32():
    images, texts = random_pairs()
    half = clip_loss(images.bfloat16(), texts.bfloat16(), torch.tensor(10.0))
    assert half.dtype == torch.float32
    exact = clip_loss(images.bfloat16().double(), texts.bfloat16().double(), scalar(10.0))
    assert half.item() == pytest.approx(exact.item(), rel=1e-5)
