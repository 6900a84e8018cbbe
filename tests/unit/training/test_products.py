"""Products on shortened inputs: what they change, against float64."""

import pytest
import torch

from mlcd.errors import ConfigInvalid
from mlcd.training.head.partial_fc import HeadConfig, PartialFC
from mlcd.training.head.products import add_product, product
from mlcd.training.processes import Processes
from mlcd.training.run.run_training import initial_state
from mlcd.world import World


def test_bf16_rounds_inputs_and_sums_in_float32():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(shape, generator=generator) for shape in ((5, 300), (300, 7)))
    exact = one.bfloat16().double() @ other.bfloat16().double()
    found = product(one, other, "bf16")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-4)
    assert (found - one @ other).abs().max() > 1e-3
    total = torch.ones_like(found)
    add_product(total, one, other, "bf16")
    assert torch.equal(total, 1 + found)
    for kind in ("fp32", "tf32"):  # a CPU has no TF32
        assert torch.equal(product(one, other, kind), one @ other)
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"


def loss_and_gradients(products, dtype):
    """Returns those of 64 embeddings near their first label's center, as amid a training."""
    config = HeadConfig(scale=16.0, negative_ratio=0.5, center_update="dense", products=products)
    head = PartialFC(2000, 256, config)
    head.initialize(0)
    head = head.to(dtype)
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 2000, (64, 4), generator=generator)
    noise = torch.randn((64, 256), generator=generator) * 0.01
    embeddings = (head.weight.detach()[labels[:, 0]] + noise.to(dtype)).requires_grad_()
    loss = head(embeddings, labels, 0).loss
    loss.backward()
    return [each.double() for each in (loss.detach(), embeddings.grad, head.weight.grad)]


def test_the_error_of_bf16_products_is_the_one_that_is_stated():
    """docs/explanation/head.md states these bounds."""
    exact = loss_and_gradients("fp32", torch.float64)
    for products, bounds in (("fp32", (1e-6,) * 3), ("bf16", (1e-4, 5e-3, 5e-3))):
        found = loss_and_gradients(products, torch.float32)
        for one, other, bound in zip(found, exact, bounds, strict=True):
            assert (one - other).norm() / other.norm() < bound


def test_what_cannot_be_had_is_refused(config):
    with pytest.raises(ConfigInvalid, match=r"requires compute\.head_products=fp32, got bf16"):
        config("run", "compute.precision=fp64", "compute.head_products=bf16")
    run = config("run", "compute.head_products=tf32")
    with pytest.raises(ConfigInvalid, match=r"compute\.head_products=tf32 requires a CUDA GPU"):
        initial_state(run, 10, Processes(World(), torch.device("cpu")))
