"""Labels in Triton's ensemble, on the real server: one call from images to the nearest centers."""

from dataclasses import replace

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request, open_artifact
from mlcd.encoders.unit_rows import unit_or_zero
from mlcd.errors import ConfigInvalid, Conflict
from mlcd.export.triton_config import TritonOptions
from mlcd.export.triton_labels import export_labels
from mlcd.service.inference.lookup import Lookup
from mlcd.types import unit_rows
from tests.triton.conftest import SILENT, Server, export, require_triton

pytestmark = pytest.mark.triton

OPTIONS = TritonOptions("python", num_threads=1)
NUM_CENTERS, TOP = 300, 12


def write_centers(folder, version, *, mean, seed=0):
    """Centers of a version's model, a third of them twice, so that many scores are ties."""
    random = np.random.default_rng(seed)
    dimension = version.summary["dimension"]
    vectors = unit_rows(random.standard_normal((NUM_CENTERS, dimension)).astype(np.float32))
    vectors[::3] = vectors[1::3]
    subtracted = 0.01 * random.standard_normal(dimension).astype(np.float32) if mean else None
    sizes = np.ones(NUM_CENTERS, np.int64)
    request = Request("centers", {"seed": seed, "mean": mean}, (), version.fingerprint)
    with Draft(folder, request) as draft:
        Centers(vectors, sizes, version.fingerprint, mean=subtracted).write(draft)
        draft.publish(summary={})
    return open_artifact(folder, "centers")


@pytest.fixture(scope="module")
def labeled(tmp_path_factory, weights):
    """A server of two models with centers, by name; those of `moved` have a mean."""
    require_triton()
    folder = tmp_path_factory.mktemp("labeled")
    found = {}
    for name, mean in (("plain", False), ("moved", True)):
        export(weights, folder / "repository", name)
        version = open_artifact(folder / "repository" / name / "1", "triton")
        made = write_centers(folder / name, version, mean=mean)
        found[name] = Centers.read(made)
        export_labels(version, made, top=TOP, options=OPTIONS, reporter=SILENT)
    server = Server(folder / "repository", folder / "triton.log")
    server.start()
    yield server, found
    server.kill()


def ask(server, name, array, given, kind):
    client = InferenceServerClient(server.url)
    tensor = InferInput(given, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    answer = client.infer(name, [tensor])
    client.close()
    return answer


@pytest.mark.parametrize("name", ["plain", "moved"])
def test_one_call_gives_the_very_labels_of_the_service(labeled, pictures, name):
    server, found = labeled
    answer = ask(server, f"{name}-labeled", pictures, "image_u8", "UINT8")
    alone = ask(server, name, pictures, "image_u8", "UINT8")
    rows = unit_or_zero(answer.as_numpy("embedding"))
    assert (rows * unit_or_zero(alone.as_numpy("embedding"))).sum(axis=1).min() > 0.99999
    ids, similarity = answer.as_numpy("ids"), answer.as_numpy("similarity")
    ours = Lookup(found[name]).nearest(rows, TOP)
    assert ids.tobytes() == ours.ids.tobytes()
    assert similarity.astype(np.float32).tobytes() == ours.scores.tobytes()


def test_ties_go_to_the_lower_id_as_in_float64(labeled):
    server, found = labeled
    vectors = found["plain"].vectors
    random = np.random.default_rng(5)
    near = vectors[:60] + 0.2 * random.standard_normal((60, vectors.shape[1]))
    rows = unit_rows(near.astype(np.float32))
    answer = ask(server, "plain-labels", rows, "embedding", "FP32")
    exact = unit_or_zero(rows).astype(np.float64) @ vectors.astype(np.float64).T
    for row, ids in zip(exact.round(12), answer.as_numpy("ids"), strict=True):
        assert ids.tolist() == np.argsort(-row, kind="stable")[:TOP].tolist()
    taken = np.take_along_axis(exact, answer.as_numpy("ids").astype(np.int64), axis=1)
    assert answer.as_numpy("similarity") == pytest.approx(taken, abs=1e-12)


def test_the_ensemble_states_whose_centers_it_has(labeled):
    server, found = labeled
    client = InferenceServerClient(server.url)
    for name, centers in found.items():
        config = client.get_model_config(f"{name}-labeled", as_json=True)["config"]
        stated = {key: value["string_value"] for key, value in config["parameters"].items()}
        assert stated == {"fingerprint.1": centers.fingerprint, "centers.1": centers.digest}
    client.close()


def test_other_centers_and_those_of_another_model_are_refused(tmp_path, labeled):
    server, _ = labeled
    version = open_artifact(server.repository / "plain" / "1", "triton")
    other = write_centers(tmp_path / "other", version, mean=False, seed=3)
    with pytest.raises(Conflict, match="plain-labels/1 holds triton made from other input"):
        export_labels(version, other, top=TOP, options=OPTIONS, reporter=SILENT)
    foreign = replace(other, fingerprint="0" * 64)
    with pytest.raises(ConfigInvalid, match="the centers are those of another model"):
        export_labels(version, foreign, top=TOP, options=OPTIONS, reporter=SILENT)
    same = open_artifact(server.repository.parent / "plain", "centers")
    again = export_labels(version, same, top=TOP, options=OPTIONS, reporter=SILENT)
    assert again.path == server.repository / "plain-labeled" / "1"
