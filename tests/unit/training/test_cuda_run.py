"""A whole training on a GPU: its losses are the CPU's, an interruption leaves no trace, and what
it trained embeds the same on both.
"""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from mlcd.encoders.torch import TorchEncoder
from mlcd.models.servable import Servable
from mlcd.training.run.run_training import run_training
from tests.unit.training.running import SILENT, before_step, configured, read_log, saved_bytes

GPU = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture
def run(labeled, digits, tiny_recipe, tmp_path):
    """Trains on the digits in this process."""

    def trained(name, *overrides):
        quick = ("telemetry.peak_tflops=1", "log_every=1")
        labels = labeled / "labels"
        run = configured(tiny_recipe, digits, labels, tmp_path / name, *quick, *overrides)
        return run_training(run, SILENT)

    yield trained
    torch.use_deterministic_algorithms(False)


def losses(run):
    return [line["loss"] for line in read_log(run) if "loss" in line]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("loss.learn_scale=true", "loss.learn_bias=true"),
        ("compute.accumulation=2", "loss.negative_ratio=0.5", "augment.brightness=0.4"),
    ],
)
def test_the_first_steps_in_float32_are_those_of_the_cpu(run, options):
    """Rounding differs by 1e-7. AdamW's first updates, of a gradient over its own size, make more of
    it.
    """
    options = ("schedule.steps=8", "compute.precision=fp32", *options)
    cpu, gpu = (losses(run(device, f"device={device}", *options)) for device in ("cpu", GPU))
    assert gpu[0] == pytest.approx(cpu[0], rel=1e-5)
    assert gpu == pytest.approx(cpu, rel=1e-3)


@pytest.mark.parametrize("products", ["fp32", "tf32", "bf16"])
def test_the_first_steps_in_bf16_are_near_and_the_loss_falls(run, products):
    options = ("compute.precision=bf16", f"compute.head_products={products}")
    gpu = losses(run("gpu", f"device={GPU}", "schedule.steps=60", *options))
    cpu = losses(run("cpu", "device=cpu", "schedule.steps=8", "compute.precision=fp32"))
    # bfloat16 has 8 significant bits
    assert gpu[0] == pytest.approx(cpu[0], rel=2e-2)
    assert np.mean(gpu[-5:]) < np.mean(gpu[:5]) - 1


class Struck(Exception):
    pass


@pytest.mark.parametrize(
    "options", [("compute.precision=fp32",), ("compute.precision=bf16", "optim.ema=0.9")]
)
def test_a_run_that_broke_off_goes_on_bit_for_bit(run, monkeypatch, options):
    options = (f"device={GPU}", "compute.deterministic=true", *options)
    whole = run("whole", *options)

    def strike(_):
        raise Struck

    with monkeypatch.context() as patch:
        before_step(patch, 14, strike)
        with pytest.raises(Struck):
            run("parts", *options)
    begun = before_step(monkeypatch, -1, strike)
    again = run("parts", *options)
    assert begun == list(range(10, 30))
    assert losses(again) == losses(whole)
    assert saved_bytes(again, 30) == saved_bytes(whole, 30)
    assert again.digest == whole.digest


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_gpu_trained_embeds_alike_on_both(run, digits, precision):
    trained = run("run", f"device={GPU}", f"compute.precision={precision}")
    weights = trained.path / "checkpoints" / "step_000030" / "weights"
    assert json.loads((weights / "config.json").read_text())["image_size"] == 16
    pixels = [
        np.asarray(Image.open(path).convert("RGB").resize((16, 16))).transpose(2, 0, 1)
        for path in sorted(digits.rglob("*.png"))
    ]
    rows = {}
    for device, engine in ((GPU, precision), (GPU, "fp32"), ("cpu", "fp32")):
        model = Servable.read(weights)
        encoder = TorchEncoder(
            model,
            name="trained",
            fingerprint=trained.fingerprint,
            preprocess=model.preprocess,
            precision=engine,
            device=device,
        )
        rows[device, engine] = encoder.encode(np.stack(pixels))
        encoder.close()
    cpu = rows["cpu", "fp32"]
    assert (cpu @ cpu.T).min() < 0.9  # they are not all alike
    for found in rows.values():
        assert (found * cpu).sum(axis=1).min() > 0.999
