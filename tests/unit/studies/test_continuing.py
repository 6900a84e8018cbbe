"""The study of training on: what its figures say, and the whole of it at toy size."""

import json
import sys

import numpy as np
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.types import Fingerprint
from studies import continuing
from studies.continuing import QUESTIONS, own_head, summary
from studies.losses.measure import Rows
from studies.losses.sets import EvaluationSet

RUNS = {run for sides in QUESTIONS.values() for run, _ in sides}


def test_differences_are_of_the_same_seed():
    figures = {
        seed: {run: dict.fromkeys(("knn", "probe", "own_head"), seed / 10) for run in RUNS}
        for seed in (1, 2, 3, 4)
    }
    for runs in figures.values():
        runs["continued"]["knn"] += 0.02
    found = summary(figures)
    assert found["continued - scratch, knn"]["points"] == "**+2.0 ± 0.0**"
    assert found["second-round - continued, knn"]["mean"] == pytest.approx(-0.02)
    assert found["continued - scratch, probe"]["points"] == "+0.0 ± 0.0"


def test_the_own_head_names_the_class_of_the_nearest_center():
    vectors = np.eye(3, dtype=np.float32)
    centers = Centers(vectors, np.ones(3, np.int64), Fingerprint("model"), names=("a", "b", "c"))
    rows = Rows(vectors[[0, 1, 2, 1]], vectors[[0, 1, 2, 1]])
    test = np.array([False, True, True, True])
    judged = EvaluationSet("toy", "nowhere", tuple("wxyz"), test, {"label": ("c", "b", "c", "a")})
    assert own_head(judged, rows, centers) == pytest.approx(2 / 3)


@pytest.mark.slow
def test_the_study_finishes_and_makes_nothing_twice(shared_data, tmp_path, monkeypatch, capsys):
    results = tmp_path / "results.json"
    places = ["--data", str(shared_data), "--out", str(tmp_path), "--results", str(results)]
    monkeypatch.setattr(sys, "argv", ["continuing", "--size", "toy", *places])
    written = []
    for _ in range(2):
        assert continuing.main() == 0
        written.append(json.loads(results.read_text()))
        made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("manifest.json")}
    assert written[0] == written[1]
    assert set(written[0]["differences"]) == set(QUESTIONS)
    assert all("n = 2" in each["points"] for each in written[0]["differences"].values())
    assert made == {path: path.stat().st_mtime_ns for path in made}
    assert "fine-tuned" in capsys.readouterr().out
