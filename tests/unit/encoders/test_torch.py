"""The torch engine beyond the contract: precisions, its CUDA graphs."""

from concurrent.futures import ThreadPoolExecutor
from shutil import which

import numpy as np
import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from mlcd.encoders import torch as torch_engine
from mlcd.encoders.encoder import job_batch
from mlcd.encoders.torch import BUCKETS, CUDA_BATCH, TorchEncoder
from mlcd.encoders.unit_rows import MAX_BATCH
from mlcd.errors import ConfigInvalid, Unavailable
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import Servable
from mlcd.models.vit import ViT, ViTConfig

SIDE = 32
pytestmark = pytest.mark.plain_cpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def servable(activation="gelu", positions="learned"):
    config = ViTConfig(
        image_size=SIDE,
        patch_size=8,
        width=64,
        depth=3,
        heads=2,
        mlp_width=128,
        embedding_dim=24,
        activation=activation,
        positions=positions,
    )
    trunk = ViT(config)
    trunk.initialize(torch.Generator().manual_seed(0))
    return Servable(trunk, PreprocessSpec(resize_shortest=SIDE, crop=SIDE))


def opened(**options):
    model = servable()
    return TorchEncoder(
        model, name="tiny", fingerprint="f" * 64, preprocess=model.preprocess, **options
    )


def images(num):
    return np.random.default_rng(0).integers(0, 256, (num, 3, SIDE, SIDE), dtype=np.uint8)


def reference(batch):
    with torch.inference_mode():
        return servable()(torch.from_numpy(batch)).numpy()


@pytest.fixture
def bf16_cpu(monkeypatch):
    """A small model in bf16 is computed without the instructions too, slowly."""
    monkeypatch.setattr(torch_engine, "computes_bf16", lambda: True)


@pytest.fixture(autouse=True)
def threads_stay_as_they_were():
    num = torch.get_num_threads()
    yield
    torch.set_num_threads(num)


def test_fp32_on_the_cpu_is_the_model_itself():
    assert opened(device="cpu").encode(images(5)) == pytest.approx(reference(images(5)), abs=1e-6)


def test_bf16_is_refused_where_the_cpu_has_none(monkeypatch):
    monkeypatch.setattr(torch_engine, "cpu_features", lambda: frozenset({"AVX2"}))
    with pytest.raises(ConfigInvalid, match="use precision fp32"):
        opened(device="cpu", precision="bf16")


def test_bf16_is_near_fp32_and_gives_float32_unit_rows(bf16_cpu):
    rows = opened(device="cpu", precision="bf16").encode(images(5))
    assert rows.dtype == np.float32
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(5), abs=1e-6)
    assert (rows * reference(images(5))).sum(axis=1).min() > 0.999


def test_bf16_rounds_the_weights_of_products_and_no_others(bf16_cpu):
    model = servable()
    TorchEncoder(
        model, name="t", fingerprint="", preprocess=model.preprocess, precision="bf16", device="cpu"
    )
    kept = {name for name, tensor in model.named_parameters() if tensor.dtype == torch.float32}
    assert "trunk.norm_pre.weight" in kept
    assert "trunk.pos" in kept
    assert not any("attn" in name or "mlp" in name or "patch" in name for name in kept)


def test_a_failing_engine_is_unavailable(monkeypatch):
    encoder = opened(device="cpu")

    def fail(_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(encoder, "_engine", fail)
    with pytest.raises(Unavailable, match="torch engine failed"):
        encoder.encode(images(1))


def test_threads_are_those_asked_for():
    opened(device="cpu", num_threads=1)
    assert torch.get_num_threads() == 1


def test_every_bounded_batch_has_a_bucket():
    assert BUCKETS[-1] == CUDA_BATCH
    assert MAX_BATCH in BUCKETS
    assert list(BUCKETS) == sorted(BUCKETS)


def test_a_job_gives_the_cpu_no_more_than_other_engines():
    assert job_batch(opened(device="cpu")) == MAX_BATCH


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
def test_a_folded_activation_is_the_same_function(activation):
    model = servable(activation)
    expected = model(torch.from_numpy(images(5)))
    for _ in range(2):  # the second time there is nothing left to fold
        for block in model.trunk.blocks:
            block.mlp.fold_quick_gelu()
        rows = model(torch.from_numpy(images(5)))
        assert torch.allclose(rows, expected, atol=1e-6)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "cosine"), [("fp32", 0.99999), ("bf16", 0.999)])
@pytest.mark.parametrize("num", [1, 3, MAX_BATCH + 3, CUDA_BATCH, CUDA_BATCH + 3])
def test_cuda_agrees_with_the_cpu(precision, cosine, num):
    rows = opened(device="cuda", precision=precision).encode(images(num))
    assert (rows * reference(images(num))).sum(axis=1).min() > cosine


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [("quick_gelu",), ("gelu", "rope")])
def test_a_tower_of_any_kind_is_recorded(options, precision):
    model, batch = servable(*options), images(5)
    with torch.inference_mode():
        expected = servable(*options)(torch.from_numpy(batch)).numpy()
    encoder = TorchEncoder(
        model,
        name="tiny",
        fingerprint="f" * 64,
        preprocess=model.preprocess,
        precision=precision,
        device="cuda",
    )
    rows = encoder.encode(batch)
    assert (rows * expected).sum(axis=1).min() > 0.999
    assert sorted(encoder._engine._recordings.keys) == [8]


@needs_gpu
@pytest.mark.gpu
def test_each_bucket_is_recorded_once():
    encoder = opened(device="cuda")
    for num in (3, 4, 3, MAX_BATCH, CUDA_BATCH + 3):
        encoder.encode(images(num))
    assert sorted(encoder._engine._recordings.keys) == [4, MAX_BATCH, CUDA_BATCH]


@needs_gpu
@pytest.mark.gpu
def test_parts_in_flight_come_back_in_order_to_every_thread():
    encoder, batch = opened(device="cuda"), images(3 * CUDA_BATCH + 7)
    starts = range(0, len(batch), CUDA_BATCH)
    alone = np.concatenate([encoder.encode(batch[at : at + CUDA_BATCH]) for at in starts])
    assert np.abs(np.diff(alone, axis=0)).max(axis=1).min() > 1e-4  # no row is like the next
    frozen = batch.copy()
    frozen.flags.writeable = False
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(encoder.encode, [batch, batch[::-1], frozen] * 4))
    for number, rows in enumerate(found):
        expected = encoder.encode(batch[::-1]) if number % 3 == 1 else alone
        assert rows == pytest.approx(expected, abs=1e-6)


@needs_gpu
@pytest.mark.gpu
def test_parts_are_halved_where_memory_does_not_suffice(monkeypatch):
    encoder, batch = opened(device="cuda"), images(CUDA_BATCH + 3)
    recordings = encoder._engine._recordings
    record = recordings._record

    def fail(bucket, call):
        if bucket > CUDA_BATCH // 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        record(bucket, call)

    monkeypatch.setattr(recordings, "_record", fail)
    assert encoder.encode(batch) == pytest.approx(reference(batch), abs=1e-4)
    assert sorted(encoder._engine._recordings.keys) == [4, CUDA_BATCH // 2]


@needs_gpu
@pytest.mark.gpu
def test_graphs_and_plain_calls_agree_and_padding_does_not_leak():
    graphs, plain = opened(device="cuda"), opened(device="cuda")
    plain._engine._recordings._can_record = False
    full = images(CUDA_BATCH)
    graphs.encode(full)  # leaves its pixels in the padding
    assert graphs.encode(full[:3]) == pytest.approx(plain.encode(full[:3]), abs=1e-5)


@needs_gpu
@pytest.mark.gpu
def test_a_recording_that_fails_falls_back(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", fail)
    with pytest.warns(RuntimeWarning, match="without CUDA graphs"):
        rows = opened(device="cuda").encode(images(3))
    assert rows == pytest.approx(reference(images(3)), abs=1e-4)


@pytest.mark.parametrize(("shape", "std"), [((SIDE, SIDE), 1.0), ((SIDE, 2 * SIDE), 0.3)])
def test_patches_of_raw_pixels_are_those_of_normalized_ones(shape, std):
    model = servable(positions="rope")
    model.mean, model.std = torch.rand(1, 3, 1, 1), std * torch.rand(1, 3, 1, 1) + 0.1
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 3, *shape), np.uint8))
    with torch.inference_mode():
        expected = model.trunk.patch(model.normalize(pixels))
        rows = model.trunk(model.normalize(pixels))
        torch_engine.fold_pixels(model)
        assert torch.allclose(model.trunk.patch(pixels), expected, atol=1e-4)
        assert torch.allclose(model.trunk(pixels), rows, atol=1e-4)


def all_bf16():
    """A model as `_prepare` makes it on a GPU, and what computes its rows."""
    model = servable().eval().requires_grad_(requires_grad=False)
    torch_engine.fold_pixels(model)
    model.trunk.to(torch.bfloat16)
    return model, torch_engine._Forward(model, torch.device("cpu"), "bf16")


def test_a_tower_in_bf16_that_takes_raw_pixels_is_near_fp32():
    _, forward = all_bf16()
    rows = forward(torch.from_numpy(images(9))).numpy()
    assert (rows * reference(images(9))).sum(axis=1).min() > 0.9995


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(which("g++") is None, reason="no compiler"),
            ],
        ),
    ],
)
def test_compiled_blocks_give_the_same_rows_for_every_batch(backend, monkeypatch):
    compiled, plain = [], torch.compile

    def count(graph, inputs):
        compiled.append(graph)
        return lookup_backend(backend)(graph, inputs)

    monkeypatch.setattr(
        torch, "compile", lambda block, **options: plain(block, backend=count, **options)
    )
    (model, forward), (_, expected) = all_bf16(), all_bf16()
    torch._dynamo.reset()
    torch_engine.compile_blocks(model, forward)
    num_compiled = len(compiled)
    assert num_compiled == 6  # the last block differs from the others, which share their code
    for num in (1, 2, 3, 16, 33):
        batch = torch.from_numpy(images(num))
        assert (forward(batch) * expected(batch)).sum(dim=1).min() > 0.9999
    assert len(compiled) == num_compiled


@pytest.mark.parametrize("fault", ["no compiler", "other rows"])
def test_blocks_that_cannot_be_compiled_stay_as_they_are(fault, monkeypatch):
    class Negated(torch.nn.Module):
        def __init__(self, block, **_):
            super().__init__()
            self.block = block

        def forward(self, x, *rest, **options):
            if fault == "no compiler":
                raise RuntimeError("Failed to find C compiler.\nSet CC")
            return -self.block(x, *rest, **options)

    monkeypatch.setattr(torch, "compile", Negated)
    (model, forward), (_, expected) = all_bf16(), all_bf16()
    reason = "Failed to find C compiler.$" if fault == "no compiler" else "the rows change$"
    with pytest.warns(RuntimeWarning, match=reason):
        torch_engine.compile_blocks(model, forward)
    batch = torch.from_numpy(images(3))
    assert torch.equal(forward(batch), expected(batch))
