"""Learned scale and bias, and weights of labels, against loops over pairs."""

import pytest
import torch
from torch.nn import functional

from mlcd.losses.negatives import draw_negatives
from mlcd.training.head.partial_fc import HeadConfig, PartialFC

KINDS = ("mlcd", "mlc", "cd")
CLASSES, STEP = 23, 3


def written_out(z, weight, labels, weights, drawn, config, log_scale, bias):
    """Each loss in float64 from its formula alone; autograd gives the gradients."""
    z, weight = functional.normalize(z, dim=1), functional.normalize(weight, dim=1)
    scale, losses = log_scale.exp(), []
    for row in range(len(z)):
        own = {}
        for label, counted in zip(labels[row].tolist(), weights[row].tolist(), strict=True):
            if label >= 0:
                own.setdefault(label, counted)
            if config.kind == "cd":
                break
        cosines = {k: z[row] @ weight[k] for k in {*own, *drawn.tolist()}}
        positives = [
            (scale * torch.cos(torch.arccos(cosines[k]) + config.margin) + bias, own[k])
            for k in sorted(own)
        ]
        negatives = [scale * cosines[k] + bias for k in drawn.tolist() if k not in own]
        p = sum((w * torch.exp(-s) for s, w in positives), z[row].sum() * 0)
        n = sum((torch.exp(s) for s in negatives), z[row].sum() * 0)
        if config.kind == "mlcd":
            if config.correct_ratio:
                n = n * (CLASSES - len(own)) / max(1, len(negatives))
            loss = torch.log1p(n) + torch.log1p(p)
        else:
            loss = torch.log1p(n * p)
        losses.append(loss)
    return torch.stack(losses).mean()


def problem(kind, seed=1):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn((9, 8), generator=generator, dtype=torch.float64)
    labels = torch.randint(-1, CLASSES, (9, 4), generator=generator)
    labels[0], labels[1] = -1, torch.tensor([5, 5, 5, -1])
    weights = torch.rand((9, 4), generator=generator, dtype=torch.float64) * 2
    weights[2, 0], weights[3] = 0.0, 0.0
    return z, labels, weights


@pytest.mark.parametrize(
    ("kind", "corrected"), [*((kind, False) for kind in KINDS), ("mlcd", True)]
)
@pytest.mark.parametrize("ratio", [1.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_the_written_out_loss_in_value_and_every_gradient(kind, ratio, weighted, corrected):
    learned = ratio < 1
    config = HeadConfig(
        kind=kind, scale=7.0, bias=-1.5 if kind == "mlcd" else 0.0, learn_scale=learned,
        learn_bias=learned and kind == "mlcd", negative_ratio=ratio, margin_grad="exact",
        correct_ratio=corrected, center_update="dense" if weighted else "sparse",
    )  # fmt: skip
    head = PartialFC(CLASSES, 8, config).double()
    head.initialize(1)
    z, labels, weights = problem(kind)
    if not weighted:
        weights = torch.ones_like(weights)
    leaf = z.clone().requires_grad_()
    loss = head(leaf, labels, STEP, weights=weights if weighted else None).loss
    loss.backward()
    z_ref, w_ref = (each.detach().clone().requires_grad_() for each in (z, head.weight))
    fixed = torch.tensor(config.scale, dtype=torch.float64).log()
    log_scale = (head.log_scale.detach().clone() if learned else fixed).requires_grad_()
    bias = torch.tensor(config.bias, dtype=torch.float64, requires_grad=True)
    drawn = draw_negatives(CLASSES, ratio, seed=0, step=STEP)
    expected = written_out(z_ref, w_ref, labels, weights, drawn, config, log_scale, bias)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(leaf.grad, z_ref.grad, atol=1e-12)
    scale = w_ref.grad.abs().max().item()
    gradient = head.weight.grad.to_dense()
    assert torch.allclose(gradient, w_ref.grad, atol=1e-12 * scale)
    radial = (gradient * head.weight.detach()).sum(dim=1)
    assert radial.abs().max() < 1e-9 * scale  # orthogonal to each center
    if learned:
        assert head.log_scale.grad.item() == pytest.approx(log_scale.grad.item(), abs=1e-12)
    if head.bias is not None:
        assert head.bias.grad.item() == pytest.approx(bias.grad.item(), abs=1e-12)


def test_chunks_change_nothing(monkeypatch):
    import mlcd.training.head.partial_fc as module

    z, labels, weights = problem("mlcd")

    def run(kind):
        config = HeadConfig(kind=kind, scale=7.0, negative_ratio=1.0, learn_scale=True)
        head = PartialFC(CLASSES, 8, config).double()
        head.initialize(1)
        leaf = z.clone().requires_grad_()
        loss = head(leaf, labels, 0, weights=weights).loss
        loss.backward()
        gradients = [leaf.grad, head.weight.grad.to_dense(), head.log_scale.grad, loss.detach()]
        return torch.cat([each.flatten() for each in gradients])

    whole = [run(kind) for kind in ("mlcd", "mlc")]
    monkeypatch.setattr(module, "CHUNK_ENTRIES", 9 * 3)
    for kind, expected in zip(("mlcd", "mlc"), whole, strict=True):
        assert torch.allclose(run(kind), expected, rtol=1e-12, atol=1e-13)
