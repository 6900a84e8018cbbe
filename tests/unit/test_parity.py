"""The parity gate in half precision, on CPUs that compute it and on those that do not."""

import onnx
import pytest
import torch

from mlcd.encoders import openvino as openvino_engine
from mlcd.errors import ArtifactInvalid
from mlcd.export.graph import write_image_graph
from mlcd.export.parity import check_parity
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import Servable
from tests.unit.models.test_checkpoints import SIZES, tower

pytestmark = pytest.mark.plain_cpu


@pytest.fixture(scope="module", params=["learned", "rope"])
def exported(request, tmp_path_factory):
    size, registers = SIZES[1], 2 if request.param == "rope" else 0
    model = Servable(
        tower(size, positions=request.param, registers=registers),
        PreprocessSpec(resize_shortest=size[0], crop=size[0]),
    )
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    write_image_graph(model, model.preprocess.crop, path)
    return model, path


@pytest.fixture
def no_bf16(monkeypatch):
    monkeypatch.setattr(openvino_engine, "capabilities", lambda: ["FP32", "INT8"])


def measured(exported, precision):
    model, path = exported
    return check_parity(model, path, None, "m", precision=precision)


def test_a_graph_takes_any_number_of_images(exported):
    (pixels,) = onnx.load(exported[1]).graph.input
    assert pixels.type.tensor_type.shape.dim[0].dim_param


def test_a_cpu_without_the_instructions_emulates_bf16_and_says_so(exported, no_bf16):
    half = measured(exported, "bf16")
    assert half.measured == "emulated bf16: weights and activations rounded"
    assert 1e-6 < 1 - half.min_cosine < 1e-3


def test_emulated_bf16_is_about_as_far_from_float32_as_the_instructions_are(
    exported, bf16, monkeypatch
):
    computed = measured(exported, "bf16")
    monkeypatch.setattr(openvino_engine, "capabilities", lambda: ["FP32"])
    emulated = measured(exported, "bf16")
    assert computed.measured == "bf16 by OpenVINO"
    assert 0.2 < (1 - emulated.min_cosine) / (1 - computed.min_cosine) < 5


def test_fp16_is_emulated_everywhere_and_finer_than_bf16(exported, no_bf16):
    half = measured(exported, "fp16")
    assert half.measured == "emulated fp16: weights and activations rounded"
    assert 1e-8 < 1 - half.min_cosine < (1 - measured(exported, "bf16").min_cosine) / 5


def test_float32_is_the_engine_s_on_every_cpu(exported, no_bf16):
    assert measured(exported, "fp32").measured == "fp32 by OpenVINO"


def test_emulating_leaves_the_model_as_it_was(exported):
    model, _ = exported
    before = model.fingerprint()
    measured(exported, "fp16")
    assert model.fingerprint() == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_activations_that_fp16_cannot_hold_are_refused(tmp_path):
    """65,504 is its largest number; bfloat16 and float32 go on."""
    trunk = tower(SIZES[1])
    with torch.no_grad():
        trunk.blocks[0].mlp.fc1.weight.mul_(1e5)
    model = Servable(trunk, PreprocessSpec(resize_shortest=32, crop=32))
    write_image_graph(model, model.preprocess.crop, tmp_path / "model.onnx")
    assert check_parity(model, tmp_path / "model.onnx", None, "m").min_cosine > 0.9999
    with pytest.raises(ArtifactInvalid, match="emulated fp16"):
        check_parity(model, tmp_path / "model.onnx", None, "m", precision="fp16")
