"""The head and its products on a GPU, against the CPU in float64."""

import pytest
import torch

from mlcd.clustering.device_scan import DeviceScan
from mlcd.losses.negatives import draw_negatives
from mlcd.training.head.partial_fc import HeadConfig, PartialFC
from mlcd.training.head.products import add_product, product

GPU = torch.device("cuda")
CPU = torch.device("cpu")
KINDS = ("mlcd", "mlc", "cd")
SCALE, CLASSES, DIMENSION = 16.0, 2000, 256
# Rounding moves a unit of float32 by 2^-24, and a product of unit rows, with sums in another order,
# hardly by more than 2^-23: SCALE times that in the logarithm of each share, and as much again for
# exponentials and sums.
FLOAT32 = 2 * SCALE * 2.0**-23
SUM_ROUNDOFF = 2.0**-23  # a GPU's float32 sums may cut instead of rounding
# Inputs of p significant bits are off by 2^-p of themselves; tensor cores may cut TF32, not round.
INPUT_ROUNDOFF = {"fp32": 0.0, "tf32": 2.0**-10, "bf16": 2.0**-8}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def loss_and_gradients(device, dtype, *, weighted=False, **options):
    """Returns those of 64 embeddings near their first label's center, as amid a training."""
    config = HeadConfig(scale=SCALE, **options)
    head = PartialFC(CLASSES, DIMENSION, config)
    head.initialize(0)
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(-1, CLASSES, (64, 4), generator=generator)
    labels[0], labels[1] = -1, torch.tensor([5, 5, 5, -1])
    noise = torch.randn((64, DIMENSION), generator=generator) * 0.01
    weights = torch.rand((64, 4), generator=generator) * 2
    embeddings = head.weight.detach()[labels[:, 0]] + noise
    head = head.to(device, dtype)
    embeddings = embeddings.to(device, dtype).requires_grad_()
    weights = weights.to(device) if weighted else None
    output = head(embeddings, labels.to(device), 3, weights=weights)
    output.loss.backward()
    gradients = [embeddings.grad, head.weight.grad.to_dense()]
    gradients += [each.grad for each in head.scalars.values()]
    found = [output.loss.detach(), *gradients]
    assert all(each.device.type == device.type for each in found)
    return [each.double().cpu() for each in found]


def assert_near(found, exact, bounds):
    for one, other, bound in zip(found, exact, bounds, strict=True):
        assert (one - other).norm() <= bound * other.norm()


@pytest.mark.parametrize("ratio", [1.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_float64_but_for_rounding(kind, ratio):
    options = {"kind": kind, "negative_ratio": ratio}
    exact = loss_and_gradients(CPU, torch.float64, **options)
    assert_near(loss_and_gradients(GPU, torch.float32, **options), exact, (FLOAT32,) * 3)
    assert_near(loss_and_gradients(CPU, torch.float32, **options), exact, (FLOAT32,) * 3)


@pytest.mark.parametrize("update", ["sparse", "dense"])
def test_learned_scalars_weights_and_every_update_of_centers(update):
    options = {"learn_scale": True, "learn_bias": True, "center_update": update}
    exact, found = (
        loss_and_gradients(device, dtype, weighted=True, **options)
        for device, dtype in ((CPU, torch.float64), (GPU, torch.float32))
    )
    # The gradients of scalars are sums that cancel in part.
    assert_near(found, exact, (*(FLOAT32,) * 3, *(16 * FLOAT32,) * 2))


@pytest.mark.parametrize(
    ("products", "bounds"), [("tf32", (1e-5, 1e-3, 1e-3)), ("bf16", (1e-4, 5e-3, 5e-3))]
)
def test_the_error_of_shortened_products_is_the_one_that_is_stated(products, bounds):
    """docs/explanation/head.md states it; TF32 was imitated on a CPU there."""
    options = {"negative_ratio": 0.5}
    exact = loss_and_gradients(CPU, torch.float64, **options)
    assert_near(loss_and_gradients(GPU, torch.float32, products=products, **options), exact, bounds)


@pytest.mark.parametrize("ratio", [1.0, 0.1, 1e-5])
@pytest.mark.parametrize("options", [{}, {"policy": "partialfc"}])
def test_negatives_are_those_that_a_cpu_draws(options, ratio):
    labels = torch.randint(-1, 100_000, (300, 1), generator=torch.Generator().manual_seed(0))
    for step in (0, 7, 10**6):
        drawn = [
            draw_negatives(
                100_000, ratio, seed=5, step=step, labels=labels.to(each), device=each, **options
            )
            for each in (CPU, GPU)
        ]
        assert drawn[1].device.type == GPU.type
        assert torch.equal(drawn[0], drawn[1].cpu())


@pytest.fixture(params=["as it begins", "after a scan", "with TF32 for others"])
def settings(request):
    """Sets PyTorch's own switch of float32 products, as other parts of a process may have."""
    before = torch.backends.cuda.matmul.fp32_precision
    if request.param == "after a scan":
        DeviceScan(torch.eye(4).numpy(), str(GPU))
    elif request.param == "with TF32 for others":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("kind", ["fp32", "tf32", "bf16"])
def test_products_err_by_no_more_than_their_inputs_were_shortened(kind, settings):
    if (kind, settings) == ("fp32", "with TF32 for others"):
        pytest.skip("float32 products are then as the process has them")
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(shape, generator=generator) for shape in ((300, 700), (200, 700)))
    start = torch.randn((300, 200), generator=generator)
    exact = one.double() @ other.double().T
    reach = one.double().abs() @ other.double().T.abs()
    left, right = one.to(GPU), other.to(GPU).T
    switch = torch.backends.cuda.matmul.fp32_precision
    found = product(left, right, kind)
    total = start.to(GPU, copy=True)
    add_product(total, left, right, kind)
    assert torch.backends.cuda.matmul.fp32_precision == switch
    assert (found.dtype, total.dtype) == (torch.float32, torch.float32)
    shortened = INPUT_ROUNDOFF[kind]
    bound = (2 * shortened + shortened**2 + 701 * SUM_ROUNDOFF) * (reach + start.abs())
    assert ((found.cpu().double() - exact).abs() <= bound).all()
    assert ((total.cpu().double() - exact - start).abs() <= bound).all()
    errors = [(each.cpu().double() - exact).abs().max() for each in (found, total - start.to(GPU))]
    # Whoever asks for shorter inputs gets them, and with them the speed: their error is not that
    # of float32, which is below 1e-4 here.
    assert all((error > 1e-3) == (kind != "fp32") for error in errors)


def test_products_in_bf16_round_inputs_alone():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(shape, generator=generator) for shape in ((64, 4096), (4096, 32)))
    left, right = one.bfloat16().double(), other.bfloat16().double()
    found = product(one.to(GPU), other.to(GPU), "bf16").cpu().double()
    assert ((found - left @ right).abs() <= 4097 * SUM_ROUNDOFF * (left.abs() @ right.abs())).all()
    assert (found - found.bfloat16()).abs().max() > 0
