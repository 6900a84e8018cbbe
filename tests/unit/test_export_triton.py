"""A Triton repository: what is in it, who parses it, what is refused, and how a later version
joins.
"""

import ast
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as protobuf

from mlcd.artifacts.manifest import open_artifact
from mlcd.encoders.openvino import OpenVinoEncoder, computes_bf16, read_onnx
from mlcd.errors import ArtifactInvalid, ConfigInvalid, Conflict
from mlcd.export import graph, triton, triton_towers
from mlcd.export import model_artifact as export
from mlcd.export.triton import export_triton
from mlcd.export.triton_config import PRECISIONS, TritonOptions
from mlcd.images.transform import PreprocessSpec
from mlcd.models import zoo
from mlcd.models.zoo import LoadOptions
from mlcd.pipelines.verify import verify
from mlcd.progress import Reporter
from tests.conftest import refuse, succeed
from tests.unit.models.test_checkpoints import SIZES, tower, write_hf

pytestmark = pytest.mark.plain_cpu

SILENT = Reporter("silent")
VARIANTS = [
    (backend, precision) for backend, precisions in PRECISIONS.items() for precision in precisions
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("towers") / "tiny"
    folder.mkdir()
    write_hf(tower(SIZES[1]), folder)
    return folder


@pytest.fixture(scope="module")
def later(tmp_path_factory) -> Path:
    """Another model of the same sizes."""
    folder = tmp_path_factory.mktemp("towers") / "later"
    folder.mkdir()
    write_hf(tower(SIZES[1], seed=5), folder)
    return folder


@pytest.fixture(scope="module")
def model(weights, tmp_path_factory) -> Path:
    """Exported once: its graph is copied from then on."""
    out = tmp_path_factory.mktemp("models") / "tiny"
    return export.export_model(str(weights), out, name="m", reporter=SILENT).path


@pytest.fixture(scope="module")
def later_model(later, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("models") / "later"
    return export.export_model(str(later), out, name="m", reporter=SILENT).path


def write(spec, out, **options):
    return export_triton(str(spec), out, **{"name": "m", "reporter": SILENT, **options})


def parsed(folder):
    return text_format.Parse((folder / "config.pbtxt").read_text(), protobuf.ModelConfig())


@pytest.mark.parametrize(("backend", "precision"), VARIANTS)
def test_tritons_own_protobuf_parses_every_variant(model, tmp_path, backend, precision):
    options = TritonOptions(
        backend, precision, max_batch=48, num_threads=None if backend in ("cuda", "tensorrt") else 3
    )
    loaded = zoo.load(str(model))
    artifact = write(model, tmp_path / "out", options=options)
    config = parsed(tmp_path / "out" / "m")
    assert (config.name, config.max_batch_size) == ("m", 48)
    assert config.backend == ("python" if backend == "python" else "onnxruntime")
    (given,), (taken,) = config.input, config.output
    pixels, numbers = protobuf.TYPE_UINT8, protobuf.TYPE_FP32
    assert (given.name, given.data_type, list(given.dims)) == ("image_u8", pixels, [3, 32, 32])
    assert (taken.name, taken.data_type, list(taken.dims)) == ("embedding", numbers, [48])
    (group,), kinds = config.instance_group, protobuf.ModelInstanceGroup
    kind = kinds.KIND_GPU if backend in ("cuda", "tensorrt") else kinds.KIND_CPU
    assert (group.count, group.kind) == (1, kind)
    policy = config.dynamic_batching.default_queue_policy
    assert policy.timeout_action == protobuf.ModelQueuePolicy.REJECT
    assert policy.allow_timeout_override
    assert (policy.max_queue_size, policy.default_timeout_microseconds) == (256, 5_000_000)
    assert [warmup.batch_size for warmup in config.model_warmup] == [1, 48]
    for shown in (warmup.inputs["image_u8"] for warmup in config.model_warmup):
        assert (list(shown.dims), shown.random_data) == ([3, 32, 32], True)
    assert list(config.version_policy.specific.versions) == [1]
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    assert parameters["fingerprint.1"] == artifact.fingerprint == loaded.fingerprint()
    assert PreprocessSpec.from_dict(json.loads(parameters["preprocess.1"])) == loaded.preprocess
    assert parameters["precision"] == precision
    named = dict.fromkeys(["cpu", "openvino"], "intra_op_thread_count") | {"python": "num_threads"}
    threads = {named[backend]: "3"} if backend in named else {}
    assert {key: value for key, value in parameters.items() if "thread" in key} == threads
    accelerators = config.optimization.execution_accelerators
    on_gpu = {one.name: dict(one.parameters) for one in accelerators.gpu_execution_accelerator}
    assert [one.name for one in accelerators.cpu_execution_accelerator] == ["openvino"] * (
        backend == "openvino"
    )
    assert list(on_gpu) == ["tensorrt"] * (backend == "tensorrt")
    if backend == "tensorrt":
        assert on_gpu["tensorrt"]["precision_mode"] == precision.upper()
        assert on_gpu["tensorrt"]["trt_layer_norm_fp32_fallback"] == "true"
        assert on_gpu["tensorrt"]["trt_profile_max_shapes"] == "image_u8:48x3x32x32"
    assert (tmp_path / "out" / "m" / "1" / "model.py").is_file() == (backend == "python")


def test_a_largest_batch_of_one_is_warmed_up_once(model, tmp_path):
    write(model, tmp_path / "out", options=TritonOptions(max_batch=1))
    assert [warmup.batch_size for warmup in parsed(tmp_path / "out" / "m").model_warmup] == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "cuda", "precision": "fp16"}, "cuda does not compute in fp16: use fp32"),
        ({"backend": "tensorrt", "precision": "bf16"}, "use fp32 or fp16"),
        ({"backend": "cuda", "num_threads": 2}, "threads is for backends on a CPU"),
        ({"max_batch": 0}, "at least 1"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, message):
    with pytest.raises(ConfigInvalid, match=message):
        TritonOptions(**options)


def test_a_run_a_checkpoint_and_its_model_artifact_give_one_model(journey, tmp_path):
    checkpoint = max((journey / "run" / "checkpoints").glob("step_*"))
    sources = [journey / "run", checkpoint, journey / "model"]
    made = [
        write(source, tmp_path / str(number), name=None) for number, source in enumerate(sources)
    ]
    assert len({artifact.fingerprint for artifact in made}) == 1
    assert [path.name for path in sorted(tmp_path.glob("*/*"))] == ["mlcd-vit"] * 3
    # Not exported a second time: the graph that the embedded engine serves, byte for byte.
    assert made[2].files["model.onnx"] == open_artifact(journey / "model").files["model.onnx"]
    assert made[0].summary["parity_source"].endswith("digits0")
    assert min(artifact.summary["parity_min_cosine"] for artifact in made) >= 0.9999


def test_the_name_is_that_of_the_model_artifact_unless_given(model, tmp_path):
    write(model, tmp_path, name=None)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_options_of_the_weights_count(weights, tmp_path):
    resized = write(weights, tmp_path, load_options=LoadOptions(image_size=16))
    assert resized.fingerprint != zoo.load(str(weights)).fingerprint()
    assert list(parsed(tmp_path / "m").input[0].dims) == [3, 16, 16]


def test_a_later_version_stands_beside_the_earlier(model, later_model, tmp_path):
    out = tmp_path / "out"
    first = write(model, out)
    before = {path: path.read_bytes() for path in (out / "m" / "1").iterdir()}
    third = write(later_model, out, version=3)
    assert {path: path.read_bytes() for path in (out / "m" / "1").iterdir()} == before
    config = parsed(out / "m")
    assert list(config.version_policy.specific.versions) == [1, 3]
    stated = {
        key: value.string_value
        for key, value in config.parameters.items()
        if key.startswith("fingerprint")
    }
    assert stated == {"fingerprint.1": first.fingerprint, "fingerprint.3": third.fingerprint}
    assert [finding.kind for finding in verify(out)] == ["triton", "model", "weights"] * 2
    assert sorted(path.name for path in (out / "m").iterdir()) == ["1", "3", "config.pbtxt"]


def test_what_is_there_is_left_alone_and_the_rest_made_up_for(model, later_model, tmp_path):
    """Killed between the two renames, the same command finishes; of an earlier version it does
    nothing.
    """
    out = tmp_path / "out"
    write(model, out)
    earlier = (out / "m" / "config.pbtxt").read_bytes()
    write(later_model, out, version=2)
    wanted = (out / "m" / "config.pbtxt").read_bytes()
    (out / "m" / "config.pbtxt").write_bytes(earlier)
    with pytest.raises(ArtifactInvalid, match=r"config\.pbtxt must equal the newest version"):
        list(verify(out))
    write(later_model, out, version=2)
    assert (out / "m" / "config.pbtxt").read_bytes() == wanted
    assert write(model, out).config["version"] == 1
    assert (out / "m" / "config.pbtxt").read_bytes() == wanted


def test_versions_that_cannot_stand_together_are_refused(model, later_model, tmp_path):
    out = tmp_path / "out"
    write(model, out, version=2)
    with pytest.raises(Conflict, match="holds version 2: give --version 3"):
        write(later_model, out, version=1)
    with pytest.raises(Conflict, match="other input or settings"):
        write(later_model, out, version=2)
    with pytest.raises(Conflict, match="need one backend, got"):
        write(later_model, out, version=3, options=TritonOptions("cpu"))
    other = tmp_path / "other"
    other.mkdir()
    write_hf(tower(SIZES[0]), other)
    with pytest.raises(
        Conflict, match=r"all versions of a model need the same sizes.*: give another --name"
    ):
        write(other, out, version=3)
    assert sorted(path.name for path in (out / "m").iterdir()) == ["2", "config.pbtxt"]


def test_directories_of_others_are_left_alone(weights, journey, tmp_path):
    with pytest.raises(Conflict, match="new or a Triton repository"):
        write(weights, journey / "model")
    (tmp_path / "out" / "m").mkdir(parents=True)
    (tmp_path / "out" / "m" / "config.pbtxt").write_text("backend: 'other'")
    with pytest.raises(Conflict, match="did not export"):
        write(weights, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "limit"), [(TritonOptions(), 0.9999), (TritonOptions("python", "bf16"), 0.999)]
)
def test_a_graph_that_disagrees_is_not_published(
    weights, later_model, tmp_path, monkeypatch, options, limit
):
    monkeypatch.setattr(
        triton_towers,
        "write_image_graph",
        lambda model, side, path: shutil.copyfile(later_model / "model.onnx", path),
    )
    with pytest.raises(ArtifactInvalid, match=f"differs from the trained one.*below {limit}"):
        write(weights, tmp_path / "out", options=options)
    assert not (tmp_path / "out" / "m" / "1").exists()
    assert not (tmp_path / "out" / "m" / "config.pbtxt").exists()


def test_half_precision_is_measured_in_half_precision(model, tmp_path):
    full = write(model, tmp_path / "a").summary["parity_min_cosine"]
    half = write(model, tmp_path / "b", options=TritonOptions("python", "bf16")).summary
    assert 0.999 <= half["parity_min_cosine"] < full
    computed = (
        "bf16 by OpenVINO" if computes_bf16() else "emulated bf16: weights and activations rounded"
    )
    assert half["parity_measured"] == computed


def test_weights_beside_the_graph_go_along(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "_MAX_GRAPH_BYTES", 100)
    model = export.export_model(str(weights), tmp_path / "model", name="m", reporter=SILENT)
    for number, spec in enumerate([weights, model.path]):
        artifact = write(spec, tmp_path / str(number))
        assert "model.onnx.data" in artifact.files
        preprocess = PreprocessSpec.read(artifact.file("preprocess.json"))
        found = read_onnx(artifact.file("model.onnx"))
        encoder = OpenVinoEncoder(found, name="m", fingerprint="", preprocess=preprocess)
        assert encoder.encode(np.zeros((1, 3, 32, 32), np.uint8)).any()
        encoder.close()


def test_the_script_imports_nothing_but_numpy_and_openvino():
    """Its environment has another numpy than mlcd."""
    tree = ast.parse((Path(triton.__file__).parent / "triton_model.py").read_text())
    modules = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    foreign = {module for module in modules if module.split(".")[0] not in sys.stdlib_module_names}
    assert foreign == {"numpy", "openvino", "triton_python_backend_utils"}


def test_the_command_makes_it_and_refuses_its_options_elsewhere(model, tmp_path):
    given = ("--backend", "python", "--threads", 2, "--name", "m", "--version", 4)
    more = ("--precision", "bf16", "--max-batch", 8, "--json")
    done = succeed("export --format triton", model, tmp_path / "out", *given, *more)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["finished"] == str(tmp_path / "out" / "m" / "4")
    config = parsed(tmp_path / "out" / "m")
    assert (config.max_batch_size, list(config.version_policy.specific.versions)) == (8, [4])
    refuse("export", model, tmp_path / "model", "--version", 2, contains="require --format triton")
