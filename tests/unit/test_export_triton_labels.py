"""Centers beside a model in a Triton repository: what is written, who reads it, what is refused."""

import subprocess
import sys

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as protobuf

from mlcd.artifacts.manifest import open_artifact
from mlcd.export.triton import export_triton
from mlcd.pipelines.verify import verify
from mlcd.progress import Reporter
from tests.conftest import call_mlcd, refuse
from tests.unit.models.test_checkpoints import SIZES, tower, write_hf
from tests.written_artifacts import write_centers

SILENT = Reporter("silent")
NUM_CENTERS = 9


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers") / "tiny"
    folder.mkdir()
    write_hf(tower(SIZES[1]), folder)
    return folder


@pytest.fixture(scope="module")
def centers(weights, tmp_path_factory):
    """Nine centers of the model, as an artifact."""
    folder = tmp_path_factory.mktemp("centers")
    version = export_triton(str(weights), folder / "repository", name="m", reporter=SILENT)
    vectors = np.random.default_rng(0).standard_normal((NUM_CENTERS, version.summary["dimension"]))
    return write_centers(folder / "c", vectors, version.fingerprint).path


def exported(weights, centers, out, *more):
    options = ("--format", "triton", "--name", "m", "--centers", centers)
    return call_mlcd("export", weights, out, *options, *more)


def parsed(folder):
    return text_format.Parse((folder / "config.pbtxt").read_text(), protobuf.ModelConfig())


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("cuda", "KIND_GPU"), ("tensorrt", "KIND_GPU"), ("openvino", "KIND_CPU")],
)
def test_tritons_own_protobuf_parses_both_models(weights, centers, tmp_path, backend, kind):
    done = exported(weights, centers, tmp_path / "out", "--backend", backend, "--max-batch", "8")
    assert done.returncode == 0, done.stderr
    assert f"labels by {NUM_CENTERS} centers, at most {NUM_CENTERS} per image" in done.stderr
    scan, ensemble = (parsed(tmp_path / "out" / f"m-{each}") for each in ("labels", "labeled"))
    assert (scan.name, scan.backend, ensemble.platform) == ("m-labels", "python", "ensemble")
    assert scan.instance_group[0].kind == getattr(protobuf.ModelInstanceGroup, kind)
    assert scan.max_batch_size == ensemble.max_batch_size == 8
    tower_step, labels_step = ensemble.ensemble_scheduling.step
    assert (tower_step.model_name, tower_step.model_version) == ("m", 1)
    assert (labels_step.model_name, labels_step.model_version) == ("m-labels", 1)
    named = {given.name for given in scan.output}
    assert set(labels_step.output_map) == named == {"ids", "similarity"}
    made = {given.name: (given.data_type, list(given.dims)) for given in ensemble.output}
    assert made["ids"] == (protobuf.TYPE_INT32, [NUM_CENTERS])
    assert made["similarity"] == (protobuf.TYPE_FP64, [NUM_CENTERS])
    assert ensemble.parameters["centers.1"].string_value == open_artifact(centers).digest
    assert all(finding.checked for finding in verify(tmp_path / "out"))


def test_the_version_carries_all_that_its_scan_imports(weights, centers, tmp_path):
    """Beside numpy: the server's environment has no mlcd."""
    assert exported(weights, centers, tmp_path / "out").returncode == 0
    folder = tmp_path / "out" / "m-labels" / "1" / "scan"
    code = f"""
import sys
sys.path.insert(0, {str(folder)!r})
sys.meta_path[:] = [found for found in sys.meta_path if "editable" not in repr(found).lower()]
from mlcd.clustering.nearest import CenterScan
from mlcd.encoders.unit_rows import unit_or_zero
import mlcd.clustering.int8_matmul, mlcd.clustering.device_scan
ours = [module for name, module in sys.modules.items() if name.split(".")[0] == "mlcd"]
print(len(ours), all(str(module.__spec__.origin).startswith({str(folder)!r}) or
                     module.__spec__.origin is None for module in ours))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    num, inside = done.stdout.split()
    assert (int(num) > 10, inside) == (True, "True")


def test_centers_are_for_triton_and_of_this_model(weights, centers, tmp_path):
    refuse(
        "export",
        weights,
        tmp_path / "model",
        "--centers",
        centers,
        contains="require --format triton",
    )
    other = tmp_path / "other"
    other.mkdir()
    write_hf(tower(SIZES[1], seed=5), other)
    done = exported(other, centers, tmp_path / "out")
    assert done.returncode == 2
    assert "the centers are those of another model" in done.stderr
    assert not (tmp_path / "out" / "m-labels").exists()
