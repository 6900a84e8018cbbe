import pytest
import torch

from mlcd.errors import InvalidInput
from mlcd.losses.discrimination import mlcd_loss
from training.parallel.partial_fc import PartialFC


def head(num_classes=20, ratio=1.0, **options):
    settings = {"scale": 16.0, "margin": 0.3, "margin_kind": "arcface", "margin_grad": "exact", "seed": 0}
    centers = PartialFC(num_classes, 8, negative_ratio=ratio, **(settings | options)).double()
    centers.initialize(torch.Generator().manual_seed(0))
    return centers


def dense_loss(z, weight, labels, scale=16.0, margin=0.3):
    """Eq. 5 over all classes by loops, from the formula alone."""
    z, weight = torch.nn.functional.normalize(z, dim=1), torch.nn.functional.normalize(weight, dim=1)
    total = torch.zeros((), dtype=z.dtype)
    for row in range(len(z)):
        own = {int(label) for label in labels[row] if label >= 0}
        p = n = torch.zeros((), dtype=z.dtype)
        for k in range(len(weight)):
            cosine = z[row] @ weight[k]
            if k in own:
                p = p + torch.exp(-scale * torch.cos(torch.arccos(cosine) + margin))
            else:
                n = n + torch.exp(scale * cosine)
        total = total + torch.log(1 + n * p + n + p)
    return total / len(z)


def test_with_all_classes_it_is_the_dense_loss_in_value_and_gradient():
    centers = head()
    generator = torch.Generator().manual_seed(1)
    z = torch.randn((5, 8), generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, 2, 3], [4, -1, -1], [19, 0, -1], [7, 8, 9], [-1, -1, -1]])
    # float32 inside the head, as in training: compare at its precision.
    positive, negative, _, _ = centers(z, labels, 0)
    loss = mlcd_loss(positive, negative)
    loss.backward()
    z_ref = z.detach().clone().requires_grad_()
    w_ref = centers.weight.detach().clone().requires_grad_()
    expected = dense_loss(z_ref, w_ref, labels)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(z.grad, z_ref.grad, atol=1e-5)
    assert torch.allclose(centers.weight.grad, w_ref.grad, rtol=1e-3, atol=1e-3 * float(w_ref.grad.abs().max()))


def test_the_length_of_a_center_does_not_matter():
    centers = head()
    z = torch.randn((3, 8), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.tensor([[1], [2], [3]])
    before = mlcd_loss(*centers(z, labels, 0)[:2])
    with torch.no_grad():
        centers.weight.mul_(torch.linspace(0.5, 3, 20)[:, None])
    after = mlcd_loss(*centers(z, labels, 0)[:2])
    assert after.item() == pytest.approx(before.item(), rel=1e-5)


def test_a_sampled_step_has_no_own_positive_among_its_negatives():
    centers = head(num_classes=100, ratio=0.2)
    z = torch.randn((4, 8), dtype=torch.float64)
    labels = torch.arange(100).view(4, 25)
    _, negative, _, cosines = centers(z, labels, 3)
    assert negative.shape == (4, 20)
    assert int((negative == -torch.inf).sum()) == 20  # each class is somebody's own
    assert torch.equal(torch.isnan(cosines), negative == -torch.inf)


def test_padding_never_reads_a_center():
    centers = head()
    with torch.no_grad():
        centers.weight[-1] = torch.nan
    positive, _, _, _ = centers(torch.ones((1, 8), dtype=torch.float64), torch.tensor([[2, -1]]), 0)
    assert torch.isfinite(positive[0, 0])
    assert positive[0, 1] == -torch.inf


def test_a_label_beyond_the_classes_is_refused_naming_the_sample():
    with pytest.raises(InvalidInput, match="sample 1"):
        head()(torch.ones((2, 8), dtype=torch.float64), torch.tensor([[1], [20]]), 0)
