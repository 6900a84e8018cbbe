"""An oracle of every loss that the studies compare: float64 loops written from the formulas alone.

Nothing of it is shared with the code under test: no tensor, no autograd, no sampling.
"""

import math

import numpy as np
import pytest
import torch

from mlcd.losses.contrastive import clip_loss, siglip_loss
from training.head.partial_fc import HeadConfig, PartialFC

CLASSES, DIMENSION, LABELS, MARGIN = 11, 6, 3, 0.3


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def arcface(cosine):
    """The cosine of the angle and the margin, and a line of slope 1 beyond pi."""
    angle = math.acos(cosine)
    if angle + MARGIN <= math.pi:
        return math.cos(angle + MARGIN)
    return cosine + math.cos(MARGIN) - 1.0


def loss_of(kind, cosines, own, scale, bias):
    """One sample's loss at r = 1: all classes but its own are negatives."""
    positive = [scale * arcface(cosines[k]) for k in own]
    negative = [scale * cosines[k] for k in range(len(cosines)) if k not in own]
    if kind == "cd":
        (only,) = positive
        return -math.log(math.exp(only) / (math.exp(only) + sum(map(math.exp, negative))))
    if kind == "mlc":
        return math.log(1 + sum(math.exp(j - i) for i in positive for j in negative))
    assert kind == "mlcd"
    # Eq. 5 as printed, with b added to every logit
    n, p = ([x + bias for x in each] for each in (negative, positive))
    pairs = sum(math.exp(j - i) for i in p for j in n)
    single = sum(math.exp(j) for j in n) + sum(math.exp(-i) for i in p)
    return math.log(1 + pairs + single)


def problem(seed=0):
    rng = np.random.default_rng(seed)
    rows, centers = rng.standard_normal((9, DIMENSION)), rng.standard_normal((CLASSES, DIMENSION))
    labels = np.stack([rng.permutation(CLASSES)[:LABELS] for _ in range(9)])
    return rows, centers, labels


def head_of(kind, centers, scale, bias):
    config = HeadConfig(kind=kind, scale=scale, bias=bias, margin=MARGIN, negative_ratio=1.0)
    head = PartialFC(CLASSES, DIMENSION, config).double()
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(centers))
    return head


@pytest.mark.parametrize("kind", ["cd", "mlc", "mlcd"])
@pytest.mark.parametrize(("scale", "bias"), [(1.0, 0.0), (16.0, 0.0), (8.0, 4.0), (8.0, -4.0)])
def test_a_head_computes_the_formula(kind, scale, bias):
    if kind != "mlcd":
        bias = 0.0
    rows, centers, labels = problem()
    if kind == "cd":
        labels = labels[:, :1]

    def written_out():
        cosines = unit(rows) @ unit(centers).T
        losses = [
            loss_of(kind, each, own, scale, bias)
            for each, own in zip(cosines.tolist(), labels.tolist(), strict=True)
        ]
        return sum(losses) / len(losses)

    head = head_of(kind, centers, scale, bias)
    leaf = torch.from_numpy(rows).requires_grad_()
    found = head(leaf, torch.from_numpy(labels), 0).loss
    assert found.item() == pytest.approx(written_out(), rel=1e-12)


@pytest.mark.parametrize("kind", ["mlcd", "mlc"])
def test_the_order_of_label_columns_does_not_matter_where_all_classes_are_negatives(kind):
    rows, centers, labels = problem()
    shuffled = np.random.default_rng(1).permuted(labels, axis=1)
    assert (shuffled != labels).any()
    head, results = head_of(kind, centers, 16.0, 0.0), []
    for each in (labels, shuffled):
        leaf = torch.from_numpy(rows).requires_grad_()
        loss = head(leaf, torch.from_numpy(each), 0).loss
        loss.backward()
        results.append((loss.item(), leaf.grad.numpy()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-10, abs=1e-14)


def test_with_one_label_eq_4_is_eq_3():
    rows, centers, labels = problem()
    losses = [
        head_of(kind, centers, 16.0, 0.0)(
            torch.from_numpy(rows), torch.from_numpy(labels[:, :1]), 0
        ).loss.item()
        for kind in ("cd", "mlc")
    ]
    assert losses[0] == losses[1]


def test_pairs_are_the_formulas():
    rng = np.random.default_rng(3)
    images, texts = unit(rng.standard_normal((7, 5))), unit(rng.standard_normal((7, 5)))
    scale, bias = 9.0, -2.5
    cosines = images @ texts.T
    softmax = sigmoid = 0.0
    for i in range(7):
        for table in (cosines, cosines.T):
            whole = sum(math.exp(scale * table[i, j]) for j in range(7))
            softmax -= math.log(math.exp(scale * table[i, i]) / whole) / 14
        for j in range(7):
            sign = 1 if i == j else -1
            sigmoid += math.log(1 + math.exp(-sign * (scale * cosines[i, j] + bias))) / 7
    rows = torch.from_numpy(images), torch.from_numpy(texts)
    double = {"dtype": torch.float64}
    t, b = torch.tensor(scale, **double), torch.tensor(bias, **double)
    assert clip_loss(*rows, t).item() == pytest.approx(softmax, rel=1e-12)
    assert siglip_loss(*rows, t, b).item() == pytest.approx(sigmoid, rel=1e-12)
