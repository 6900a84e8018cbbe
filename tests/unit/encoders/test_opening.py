"""Which engine a model is opened with, and what is refused."""

import numpy as np
import pytest

import mlcd.encoders
from mlcd.encoders import choose_engine, open_encoder
from mlcd.encoders import openvino as openvino_engine
from mlcd.encoders.options import EncoderOptions
from mlcd.encoders.unit_rows import MAX_BATCH, encode_in_parts
from mlcd.errors import ConfigInvalid
from mlcd.extras import install_command
from tests.conftest import run_python


def without(monkeypatch, *packages):
    installed = mlcd.encoders._is_installed
    monkeypatch.setattr(
        mlcd.encoders, "_is_installed", lambda name: name not in packages and installed(name)
    )


def test_a_cpu_takes_openvino_and_leaves_torch_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(mlcd.encoders, "_cuda_works", lambda: pytest.fail("torch was asked"))
    assert choose_engine(tmp_path).engine == "openvino"


@pytest.mark.parametrize(("works", "engine"), [(True, "torch"), (False, "openvino")])
def test_a_gpu_takes_torch_where_torch_can_use_it(tmp_path, monkeypatch, works, engine):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(mlcd.encoders, "_cuda_works", lambda: works)
    assert choose_engine(tmp_path).engine == engine


def test_the_driver_s_other_device_files_are_no_gpu(tmp_path, monkeypatch):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(mlcd.encoders, "_cuda_works", lambda: pytest.fail("torch was asked"))
    assert choose_engine(tmp_path).engine == "openvino"


def test_without_openvino_a_cpu_takes_torch(tmp_path, monkeypatch):
    without(monkeypatch, "openvino")
    assert choose_engine(tmp_path) == mlcd.encoders.Choice("torch", "OpenVINO is not installed")
    without(monkeypatch, "openvino", "torch")
    assert install_command("serve") in choose_engine(tmp_path).reason


@pytest.mark.parametrize(
    ("spec", "engine", "remedy"),
    [
        ("hog", "torch", "engine auto"),
        ("pixels", "openvino", "engine auto"),
        ("m.onnx", "torch", "engine openvino"),
    ],
)
def test_a_wrong_combination_is_refused(spec, engine, remedy):
    with pytest.raises(ConfigInvalid, match=remedy):
        open_encoder(spec, EncoderOptions(engine=engine))


def test_bf16_is_refused_where_the_cpu_has_none(journey, monkeypatch):
    monkeypatch.setattr(openvino_engine, "capabilities", lambda: ["FP32"])
    with pytest.raises(ConfigInvalid, match="use precision fp32"):
        open_encoder(str(journey / "model"), EncoderOptions(engine="openvino", precision="bf16"))


@pytest.mark.parametrize(("asked", "expected"), [(0, 3), (1, 1)])
def test_openvino_is_told_its_threads(journey, monkeypatch, asked, expected):
    """From the process's own cores, not from the machine's."""
    monkeypatch.setattr(openvino_engine, "available_cores", lambda: 3)
    told = {}

    compile_model = openvino_engine.ov.Core.compile_model

    def recording(self, model, device, config):
        told.update(config)
        return compile_model(self, model, device, config)

    # On the one Core: a second one that ends would leave signals without their stack.
    monkeypatch.setattr(openvino_engine.ov.Core, "compile_model", recording)
    open_encoder(
        str(journey / "model"), EncoderOptions(engine="openvino", num_threads=asked)
    ).close()
    assert told["INFERENCE_NUM_THREADS"] == expected


def test_opening_warms_up_with_one_image_and_a_few(journey, monkeypatch):
    sizes = []
    run = openvino_engine._Compiled.run
    monkeypatch.setattr(
        openvino_engine._Compiled,
        "run",
        lambda self, images: (sizes.append(len(images)), run(self, images))[1],
    )
    open_encoder(str(journey / "model"), EncoderOptions(engine="openvino")).close()
    assert sizes == [1, 4]


def test_an_engine_never_sees_more_than_the_bound():
    sizes = []

    def run(images):
        sizes.append(len(images))
        return images.reshape(len(images), -1)[:, :3].astype(np.float32) + 1

    batch = np.random.default_rng(0).integers(0, 256, (2 * MAX_BATCH + 1, 3, 2, 2), dtype=np.uint8)
    rows = encode_in_parts(batch, run, crop=2, dimension=3)
    assert sizes == [MAX_BATCH, MAX_BATCH, 1]
    expected = batch.reshape(len(batch), -1)[:, :3].astype(np.float64) + 1
    assert rows == pytest.approx(
        expected / np.linalg.norm(expected, axis=1, keepdims=True), abs=1e-6
    )


def run_blocked(package, body):
    code = f"import sys\nsys.modules[{package!r}] = None\n{body}"
    return run_python(code, check=False)


def test_everything_but_the_torch_engine_opens_without_torch(journey):
    model = str(journey / "model")
    result = run_blocked(
        "torch",
        f"""
from mlcd.encoders import choose_engine, open_encoder
from mlcd.encoders.options import EncoderOptions
from mlcd.errors import ConfigInvalid
print(choose_engine().engine, open_encoder("pixels").engine, open_encoder({model!r}).engine)
try:
    open_encoder({model!r}, EncoderOptions(engine="torch"))
except ConfigInvalid as error:
    print(error.remedy)
""",
    )
    assert result.stdout.splitlines() == [
        "openvino numpy openvino",
        install_command("train"),
    ], result.stderr


def test_a_model_opens_without_openvino(journey):
    body = f"""
from mlcd.encoders import open_encoder
print(open_encoder({str(journey / "model")!r}).engine)
"""
    assert run_blocked("openvino", body).stdout.strip() == "torch"
