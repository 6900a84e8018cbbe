"""Which CPUs compute int8, and how a model is opened in it."""

import os
import shutil
from contextlib import closing, nullcontext
from dataclasses import replace

import pytest

import mlcd.encoders
from mlcd.artifacts.manifest import FileEntry, open_artifact
from mlcd.cores import cpu_features
from mlcd.encoders import open_encoder, open_text_encoder
from mlcd.encoders import openvino as engine
from mlcd.encoders.options import EncoderOptions
from mlcd.errors import ArtifactInvalid, ConfigInvalid
from tests.conftest import PLAIN_CPU, run_python

IN_INT8 = EncoderOptions(precision="int8")
AVX512 = ["WINOGRAD", "FP32", "INT8"]
AVX2 = ["FP32", "INT8"]


@pytest.mark.parametrize(
    ("features", "capabilities", "computes"),
    [
        ({"AVX2"}, AVX2, False),
        ({"AVX2", "AVX_VNNI"}, AVX2, True),
        ({"AVX2", "AVX512F"}, AVX512, False),
        ({"AVX2", "AVX512F", "AVX512_BF16"}, AVX512, False),
        ({"AVX2", "AVX512F", "AVX512_VNNI"}, AVX512, True),
        ({"AVX2", "AVX512F", "AMX_INT8", "AMX_BF16"}, AVX512, True),
        # OpenVINO was told to do without AVX-512
        ({"AVX2", "AVX512F", "AVX512_VNNI", "AVX_VNNI"}, AVX2, False),
        (set(), AVX2, False),
    ],
)
def test_int8_is_computed_by_vnni_or_amx(monkeypatch, features, capabilities, computes):
    monkeypatch.setattr(engine, "cpu_features", lambda: frozenset(features))
    monkeypatch.setattr(engine, "capabilities", lambda: capabilities)
    assert engine.computes_int8() == computes


@pytest.mark.plain_cpu
def test_a_plain_cpu_computes_no_int8():
    """In a process of its own: OpenVINO asks once."""
    if "AVX512F" not in cpu_features() and "AVX_VNNI" in cpu_features():
        pytest.skip("VNNI of AVX2 is told from the CPU alone, which cannot be made plain")
    code = "from mlcd.encoders.openvino import computes_int8; print(computes_int8())"
    told = run_python(code, env={**os.environ, **PLAIN_CPU})
    assert told.stdout == "False\n"


def test_a_cpu_without_the_instructions_refuses_it(monkeypatch, journey):
    monkeypatch.setattr(engine, "computes_int8", lambda: False)
    with pytest.raises(ConfigInvalid, match=r"VNNI or AMX.*use precision fp32"):
        open_encoder(str(journey / "model"), IN_INT8)


def test_a_model_without_the_graph_is_refused_with_the_command_that_makes_it(int8, journey):
    with pytest.raises(
        ConfigInvalid,
        match=r"int8 needs an int8 graph, which .* lacks: make one with `mlcd quantize",
    ):
        open_encoder(str(journey / "model"), IN_INT8)


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ("hog", IN_INT8, "needs precision fp32"),
        ("m.onnx", IN_INT8, "use precision fp32 or bf16"),
        (None, EncoderOptions(precision="int8", engine="torch"), "needs the engine openvino"),
    ],
)
def test_what_has_no_int8_is_refused(journey, spec, options, said):
    with pytest.raises(ConfigInvalid, match=said):
        open_encoder(spec or str(journey / "model"), options)


def test_the_torch_engine_refuses_it_too():
    torch = pytest.importorskip("torch")
    from mlcd.encoders.torch import _check_precision

    with pytest.raises(ConfigInvalid, match="needs the engine openvino"):
        _check_precision("int8", torch.device("cpu"))


def test_int8_is_opened_on_request_alone_and_by_openvino(int8_model, monkeypatch):
    monkeypatch.setattr(
        mlcd.encoders, "choose_engine", lambda: mlcd.encoders.Choice("torch", "a GPU")
    )
    with closing(open_encoder(str(int8_model), IN_INT8)) as encoder:
        assert encoder.engine == "openvino"
        assert encoder.precision.startswith("int8-")
    with closing(open_encoder(str(int8_model))) as encoder:
        assert (encoder.engine, encoder.precision) == ("torch", "fp32")


@pytest.mark.parametrize("name", ["int8.xml", "int8.bin"])
def test_two_graphs_of_one_model_are_two_precisions(name, journey):
    """Calibrated on other images, a model gives other rows under one fingerprint."""
    entries = {each: FileEntry(1, 64 * "0") for each in ("int8.xml", "int8.bin")}
    model = replace(open_artifact(journey / "model"), files=entries)
    other = replace(model, files={**entries, name: FileEntry(1, 64 * "1")})
    assert engine._revision(model) != engine._revision(other)


def test_texts_beside_images_in_int8_are_in_fp32(int8, two_tower_model):
    with closing(open_text_encoder(str(two_tower_model), IN_INT8)) as encoder:
        assert (encoder.engine, encoder.precision) == ("openvino", "fp32")


@pytest.mark.parametrize(
    ("name", "refused"),
    [("int8.xml", True), ("int8.bin", True), ("preprocess.json", True), ("model.onnx", False)],
)
def test_damage_is_refused_in_every_file_that_int8_reads(name, refused, int8_model, tmp_path):
    model = shutil.copytree(int8_model, tmp_path / "model")
    content = bytearray((model / name).read_bytes())
    content[len(content) // 2] ^= 1
    (model / name).write_bytes(content)
    expected = pytest.raises(ArtifactInvalid, match=f"{name} differs") if refused else nullcontext()
    with expected:
        open_encoder(str(model), IN_INT8).close()
