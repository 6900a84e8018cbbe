"""`mlcd evaluate` knows what a run was trained on and what its centers were made from, by the bytes
of the images.
"""

import json
import shutil

import pytest

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import open_artifact
from mlcd.artifacts.selection import Selection
from mlcd.training.evaluation.seen import are_clusters_clean
from tests.conftest import call_mlcd, refuse, succeed
from tests.unit.training.running import evaluated


@pytest.fixture(scope="module")
def runs(journey, digits, tiny_recipe, tmp_path_factory):
    """Runs by what they held out: of the centers, and of training."""
    out = tmp_path_factory.mktemp("runs")
    for share in (0, 0.2):
        centers, labels, features = (
            out / f"centers-{share}",
            out / f"labels-{share}",
            journey / "features",
        )
        succeed("cluster --clusters 10", features, centers, "--hold-out", share)
        succeed("label --top 2", features, labels, "--centers", centers)
    for clustered, trained in ((0, 0), (0, 0.2), (0.2, 0), (0.2, 0.2)):
        places = [
            f"data.images={digits}",
            f"data.labels={out / f'labels-{clustered}'}",
            f"data.hold_out={trained}",
        ]
        run = f"out={out / f'run-{clustered}-{trained}'}"
        succeed("train", tiny_recipe, *places, run, "schedule.steps=10")
    return out


@pytest.mark.parametrize(
    ("name", "trained", "clustered"),
    [("0-0", 40, 40), ("0-0.2", 0, 40), ("0.2-0", 40, 0), ("0.2-0.2", 0, 0)],
)
def test_what_was_seen_is_refused_or_counted(name, trained, clustered, runs):
    run, seen = runs / f"run-{name}", max(trained, clustered)
    for kind in ("knn", "linear-probe") if name == "0-0" else ("knn",):
        result = call_mlcd("evaluate", kind, run)
        assert result.returncode == (2 if seen else 0), result.stderr
        if seen:
            assert f"40 of 40 test images were used to make {run}" in result.stderr
            assert f"{trained} trained on, {clustered} clustered" in result.stderr
            assert "--seen" in result.stderr
    assert are_clusters_clean(open_artifact(run, "run"), 0.2) == (clustered == 0)
    facts = {"images": seen, "trained_on": trained, "clustered": clustered, "unknown": []}
    assert evaluated("knn", run, "--seen")["seen"] == facts
    line = call_mlcd("evaluate", "knn", run, "--seen").stdout
    assert (
        f"seen {seen} ({trained} trained on, {clustered} clustered)" if seen else "seen 0\n"
    ) in line
    assert evaluated("knn", run / "checkpoints" / "step_000000")["seen"]["images"] == 0


def test_an_image_is_known_by_its_bytes_wherever_it_lies(runs, digits, tmp_path):
    """In another folder, under other names: 0 to 9 are the classes, and each key begins
    with one.
    """
    run = runs / "run-0.2-0.2"
    for side in ("train", "test"):
        for folder in sorted(digits.iterdir()):
            shutil.copytree(folder, tmp_path / side / f"digit {folder.name}")
    sides = ("--train", tmp_path / "train", "--test", tmp_path / "test")
    refuse("evaluate", "knn", run, *sides, contains="160 of 200 test images were used")
    assert evaluated("knn", run, *sides, "--seen")["seen"]["trained_on"] == 160
    refuse("evaluate", "knn", run, "--hold-out", 0, contains="160 of 200 test images were used")


def test_clusters_of_all_images_say_how_many_were_seen(runs):
    assert evaluated("clusters", runs / "run-0.2-0.2")["seen"]["images"] == 160


def test_what_cannot_be_looked_up_is_said(runs, digits, tmp_path):
    shutil.copytree(runs / "run-0.2-0.2", tmp_path / "moved")
    record = evaluated("knn", tmp_path / "moved", "--images", digits)
    assert record["seen"]["images"] == 0
    assert len(record["seen"]["unknown"]) == 2
    line = call_mlcd("evaluate", "knn", tmp_path / "moved", "--images", digits).stdout
    assert "unknown: what it was trained on" in line
    assert "unknown: what its centers were made from" in line


def test_centers_hold_out_what_training_and_evaluation_hold_out(journey, tmp_path):
    result = call_mlcd("cluster", journey / "features", tmp_path / "centers", "--clusters", 10)
    assert "10 centers of 160 rows (40 held out)" in result.stdout
    config = json.loads((tmp_path / "centers" / "manifest.json").read_text())["config"]
    assert config["hold_out"] == 0.2


def test_a_run_on_a_selection_has_seen_what_is_kept(runs, journey, digits, tiny_recipe, tmp_path):
    chosen, run = tmp_path / "selection", tmp_path / "run"
    options = ("--centers", runs / "centers-0", "--balance", 120)
    succeed("curate", journey / "features", chosen, *options)
    places = [f"data.images={digits}", f"data.labels={runs / 'labels-0.2'}", "data.hold_out=0"]
    command = ("train", tiny_recipe, *places, f"out={run}", "schedule.steps=10")
    succeed(*command, f"data.selection={chosen}")
    artifact = open_artifact(run)
    assert artifact.summary["samples"] == 120
    parents = {parent.role: parent.digest for parent in artifact.parents}
    assert parents["selection"] == open_artifact(chosen).digest
    opened = EmbeddingsArtifact.open(journey / "features")
    tested = {key for key, held in zip(opened.keys, opened.held_out(0.2), strict=True) if held}
    kept = set(Selection.open(chosen).read_keys().to_pylist())
    facts = evaluated("knn", run, "--seen")["seen"]
    assert (facts["trained_on"], facts["unknown"]) == (len(tested & kept), [])
    assert call_mlcd(*command, f"data.selection={tmp_path / 'none'}").returncode == 2
    shutil.rmtree(chosen)
    assert "selection is no longer at its path" in evaluated("knn", run)["seen"]["unknown"][0]
