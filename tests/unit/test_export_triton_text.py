"""Both towers of a model in a Triton repository: NAME, and NAME-text beside it."""

import hashlib

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as protobuf

from mlcd.artifacts.manifest import open_artifact
from mlcd.errors import ConfigInvalid, Conflict
from mlcd.export.triton import export_triton
from mlcd.export.triton_config import PRECISIONS, TritonOptions
from mlcd.pipelines.verify import verify
from mlcd.progress import Reporter

SILENT = Reporter("silent")


def write(model, out, **options):
    return export_triton(str(model), out, **{"name": "m", "reporter": SILENT, **options})


def parsed(folder):
    return text_format.Parse((folder / "config.pbtxt").read_text(), protobuf.ModelConfig())


@pytest.mark.parametrize("backend", PRECISIONS)
def test_both_towers_stand_beside_each_other(two_tower_model, tmp_path, backend):
    images = write(two_tower_model, tmp_path, options=TritonOptions(backend))
    text = open_artifact(tmp_path / "m-text" / "1", "triton")
    stated = open_artifact(two_tower_model)
    assert images.path == tmp_path / "m" / "1"
    assert text.fingerprint == images.fingerprint == stated.fingerprint
    names = {"config.json", "config.pbtxt", "model.onnx", "tokenizer.json"}
    assert text.files.keys() == names | ({"model.py"} if backend == "python" else set())
    assert text.summary["parity_min_cosine"] > 0.9999
    assert text.summary["parity_captions"] == 34
    config = parsed(tmp_path / "m-text")
    assert config.name == "m-text"
    (given,), (row,) = config.input, config.output
    assert (given.name, list(given.dims), given.data_type) == ("ids", [-1], protobuf.TYPE_INT64)
    assert (row.name, list(row.dims)) == ("embedding", [32])
    (warm, *_) = config.model_warmup
    assert warm.inputs["ids"].zero_data
    assert list(warm.inputs["ids"].dims) == [12]
    tokenizer = (two_tower_model / "text" / "tokenizer.json").read_bytes()
    found = {key: parameter.string_value for key, parameter in config.parameters.items()}
    assert found["tokenizer.1"] == hashlib.sha256(tokenizer).hexdigest()
    assert found["fingerprint.1"] == stated.fingerprint
    assert found["precision"] == "fp32"
    for artifact in (images, text):
        assert all(finding.checked for finding in verify(artifact.path))
    assert write(two_tower_model, tmp_path, options=TritonOptions(backend)) == images


def test_tensorrt_gets_a_profile_over_lengths(two_tower_model, tmp_path):
    write(two_tower_model, tmp_path, options=TritonOptions("tensorrt"))
    (provider,) = parsed(
        tmp_path / "m-text"
    ).optimization.execution_accelerators.gpu_execution_accelerator
    shapes = {key: value for key, value in provider.parameters.items() if "shapes" in key}
    assert shapes == {
        "trt_profile_min_shapes": "ids:1x1",
        "trt_profile_opt_shapes": "ids:32x6",
        "trt_profile_max_shapes": "ids:64x12",
    }


def test_half_precision_is_measured_on_captions(two_tower_model, tmp_path):
    write(two_tower_model, tmp_path, options=TritonOptions("python", "bf16"))
    facts = open_artifact(tmp_path / "m-text" / "1").summary
    assert 0.999 <= facts["parity_min_cosine"] < 1
    assert "bf16" in facts["parity_measured"]


def test_texts_can_be_left_out(two_tower_model, tmp_path):
    images = write(two_tower_model, tmp_path, text=False)
    assert write(two_tower_model, tmp_path, text=False) == images
    assert not (tmp_path / "m-text").exists()
    assert images.fingerprint != open_artifact(two_tower_model).fingerprint
    with pytest.raises(Conflict):
        write(two_tower_model, tmp_path)


def test_a_checkpoint_gives_what_its_artifact_gives(two_tower_model, tmp_path):
    write(two_tower_model.parent / "theirs", tmp_path / "weights")
    write(two_tower_model, tmp_path / "artifact")
    for name in ("m", "m-text"):
        one, other = (
            open_artifact(tmp_path / place / name / "1") for place in ("weights", "artifact")
        )
        assert one.fingerprint == other.fingerprint
        configs = {name: entry for name, entry in one.files.items() if not name.endswith(".onnx")}
        assert configs.items() <= other.files.items()


def test_a_tower_of_images_cannot_follow_one_of_texts(two_tower_model, tmp_path):
    write(two_tower_model, tmp_path)
    with pytest.raises(Conflict, match=r"16 x 16 pixels; and .* 12 tokens"):
        write(two_tower_model, tmp_path, name="m-text", version=2, text=False)


def test_a_bare_graph_is_served_in_fp32(two_tower_model, tmp_path):
    from mlcd.export.triton_towers import text_tower

    part = tmp_path / "text"
    part.mkdir()
    for file in ("config.json", "model.onnx", "tokenizer.json"):
        (part / file).write_bytes((two_tower_model / "text" / file).read_bytes())
    assert text_tower(part, "f" * 64, name="m", precision="fp32").check(part) == {}
    with pytest.raises(ConfigInvalid, match="use precision fp32"):
        text_tower(part, "f" * 64, name="m", precision="bf16")
