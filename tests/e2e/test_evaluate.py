"""`mlcd evaluate`: kinds, features, protocol, several processes, and one line for what cannot be
evaluated.
"""

import json

import pytest

from mlcd.training.evaluation.representations import locate, open_representation
from mlcd.training.evaluation.splits import ListedKeys
from tests.conftest import call_mlcd, refuse, succeed
from tests.ranks import call_together


def evaluated(*arguments):
    result = succeed("evaluate", *arguments, "--json")
    return json.loads(result.stdout.splitlines()[-1])["results"]


def refused(*arguments, contains):
    refuse("evaluate", *arguments, contains=contains)


def test_every_number_comes_with_its_protocol(journey, digits, tmp_path):
    out = tmp_path / "evaluation"
    probe = (
        "linear-probe",
        journey / "run",
        journey / "features",
        "--metric",
        "mean-per-class",
        "--out",
        out,
    )
    run, features = evaluated(*probe)
    for result, name in ((run, "step_000030"), (features, "features")):
        assert result["representation"] == name
        metrics, protocol = result["metrics"], result["protocol"]
        assert (
            metrics["train_images"] + metrics["validation_images"] + metrics["test_images"] == 200
        )
        assert metrics["test_images"] == 40
        assert 1e-6 <= metrics["c"] <= 1e6
        assert metrics["objective_gap"] < 1e-6
        assert {
            name: protocol[name]
            for name in ("kind", "features", "metric", "hold_out", "images", "classes")
        } == {
            "kind": "linear-probe",
            "features": "embedding",
            "metric": "mean-per-class",
            "hold_out": 0.2,
            "images": 200,
            "classes": 10,
        }
        assert len(protocol["split"]) == 64
    assert run["protocol"]["split"] == features["protocol"]["split"]
    assert features["metrics"]["linear_probe_mean_per_class"] > 0.8
    assert evaluated(*probe) == [run, features]  # the artifact's, as it was
    told = call_mlcd("evaluate", *probe).stdout
    assert told.count("\n") == 3
    assert f"split {run['protocol']['split'][:12]}" in told


def test_pooled_features_are_others(journey):
    (served,), (pooled,) = (
        evaluated("linear-probe", journey / "run", "--features", name)
        for name in ("embedding", "pooled")
    )
    assert served["protocol"]["features"] == "embedding"
    assert pooled["protocol"]["features"] == "pooled"
    assert served["metrics"]["objective"] != pooled["metrics"]["objective"]
    assert served["digest"] == pooled["digest"]


@pytest.mark.parametrize("kind", ["knn", "linear-probe", "clusters"])
def test_two_processes_tell_the_same_once(kind, journey, tmp_path):
    out = tmp_path / "evaluation"
    together = call_together(2, "evaluate", kind, journey / "run", "--json", "--out", out)
    assert together.returncode == 0, together.stderr
    (told,) = [line for line in together.stdout.splitlines() if "results" in line]
    (result,), (alone,) = json.loads(told)["results"], evaluated(kind, journey / "run")
    assert result["protocol"] == alone["protocol"]
    gap = {"objective_gap": result["metrics"].get("objective_gap")}
    expected = {**alone["metrics"], **(gap if kind == "linear-probe" else {})}
    # Two processes have half the threads each, and so round the model's products in another way.
    assert result["metrics"] == pytest.approx(expected, rel=1e-5)
    assert json.loads((out / "results.json").read_text()) == [result]


def test_what_cannot_be_evaluated_gets_one_line(journey):
    features = journey / "features"
    pooled = ("linear-probe", features, "--features", "pooled")
    refused(*pooled, contains="--features pooled requires a checkpoint or a run")
    refused("linear-probe", features, "--hold-out", 0, contains="none falls into the test part")
    refused("linear-probe", features, "--neighbors", 3, contains="No such option")
    refused("guess", features, contains="No such command")


def test_split_files_folds_and_labels_are_taken_by_key(journey, digits, tmp_path):
    keys = sorted(str(path.relative_to(digits)) for path in digits.rglob("*.png"))
    split, folds, labels = (
        tmp_path / name for name in ("split.json", "folds.json", "labels.jsonl")
    )
    parts = {"train": keys[::2], "test": keys[1::4]}
    split.write_text(json.dumps(parts))
    folds.write_text(json.dumps({"folds": [keys[::4], keys[2::4]], "test": parts["test"]}))
    rows = [{"path": key, "labels": ["even"] * (int(key[0]) % 2 == 0)} for key in keys]
    rows = [
        row | {"labels": [*row["labels"], "small"] if row["path"] < "5" else row["labels"]}
        for row in rows
    ]
    stated = "".join(json.dumps(row) + "\n" for row in rows)
    labels.write_text(stated)
    out = tmp_path / "out"
    features, run = journey / "features", journey / "run"
    (one,) = evaluated("knn", features, "--split", split, "--out", out)
    assert one["metrics"]["test_images"] == len(parts["test"])
    low, high = one["intervals"]["knn_accuracy"]
    assert low <= one["metrics"]["knn_accuracy"] <= high
    assert (out / "images-00000.parquet").is_file()
    assert "difference +0 " in call_mlcd("evaluate", "compare", out, out).stdout
    (mean,) = evaluated("knn", features, "--split", folds)
    assert mean["metrics"]["deviation_of_folds"] >= 0
    assert mean["protocol"]["folds"] == 2
    probe = ("linear-probe", "--labels", labels, "--metric", "map-11", "--split", split, "--seen")
    (result,) = evaluated(*probe, run, "--images", digits)
    assert result["metrics"]["linear_probe_map_11"] > 0.6
    assert result["protocol"]["metric"] == "map-11"
    assert result["protocol"]["classes"] == 2
    stored = open_representation(locate(features), listed=ListedKeys(keys[::3], "these")).samples
    assert list(stored.keys) == keys[::3]
    (alone,) = evaluated("knn", features, "--leave-one-out")
    assert alone["metrics"]["test_images"] == 200
    refused("knn", features, "--leave-one-out", "--hold-out", 0.5, contains="leave out --hold-out")
    refused(
        "knn", features, "--split", split, "--hold-out", 0.5, contains="--split already sets what"
    )
    refused("linear-probe", features, "--labels", labels, contains="require each other")
    labels.write_text('{"path": "elsewhere.png", "labels": ["even"]}\n')
    refused(*probe, run, "--images", digits, contains="has the key 'elsewhere.png'")
    lost = [json.dumps({"path": f"lost{key}", "labels": ["even"]}) for key in keys[:2]]
    labels.write_text(stated + "\n".join(lost))
    for subject in ((features,), (run, "--images", digits)):
        refused(*probe, *subject, contains=f"has the key 'lost{keys[0]}'")
    (allowed,) = evaluated(*probe, run, "--images", digits, "--allow-unmatched")
    assert allowed["metrics"] == result["metrics"]
