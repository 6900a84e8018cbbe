"""The study's command at toy size, on real photographs: it finishes, resumes, repeats itself and
fills the report.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

# The runner of the first study, which is finished: it changes no more with the rest.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "mlc": "lr0.001-s16-r1-steps12",
    "mlcd": "lr0.001-s16-r1-steps12",
    "instance_sigmoid": "lr0.001-s10-steps12",
    "untrained": "lr0.001-s10-steps0",
}
SET_UP = {"tiny_imagenet_30", "cifar10_jpg", "caltech101_20", "fashion_products", "pretrain"}


def study(module, *arguments):
    command = [
        sys.executable,
        "-m",
        f"studies.losses{module}",
        "--tier",
        "toy",
        *map(str, arguments),
    ]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=280, check=False
    )


def name_of(arm):
    return f"report/{arm}-seed1-{SETTINGS[arm]}"


@pytest.fixture(scope="module")
def finished(shared_data, tmp_path_factory):
    """Seed 1 of two arms of clusters, of one of instances and of the untrained tower."""
    folder = tmp_path_factory.mktemp("study")
    only = [word for arm in SETTINGS for word in ("--only", name_of(arm))]
    result = study(
        "", "--data", shared_data, "--out", folder, "--results", folder / "results", *only
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_every_run_states_what_made_it(finished):
    rows = pq.read_table(finished / "results" / "toy.parquet").to_pylist()
    assert {row["run"] for row in rows} == {name_of(arm) for arm in SETTINGS}
    assert {row["set"] for row in rows} == SET_UP
    assert {row["metric"] for row in rows} == {"knn", "linear_probe", "map"}
    for row in rows:
        assert 0 <= row["value"] <= 1
        assert row["command"] == f"python -m studies.losses --tier toy --only {row['run']}"
        assert row["cpu"]
        assert row["cores"] >= 1
        assert row["commit"]
    assert str(finished) not in json.dumps(rows)


def test_cosines_are_kept(finished):
    points = pq.read_table(finished / "results" / "toy-curves.parquet").to_pylist()
    assert {point["run"].split("/")[1].partition("-")[0] for point in points} == {
        "mlc",
        "mlcd",
        "instance_sigmoid",
    }
    assert all(-1 <= point["positive_cosine"] <= 1 for point in points)


def test_finished_runs_are_left_alone_and_a_lost_one_repeats_its_numbers(finished, shared_data):
    results = {path: path.read_bytes() for path in finished.glob("toy/runs/*/*/result.json")}
    lost = next(path for path in results if "/mlcd-" in str(path))
    shutil.rmtree(lost.parent)
    places = ("--data", shared_data, "--out", finished, "--results", finished / "results")
    result = study("", *places, "--only", name_of("mlcd"), "--only", name_of("mlc"))
    assert result.returncode == 0, result.stderr
    before, after = json.loads(results.pop(lost)), json.loads(lost.read_text())
    name, numbers = f"report/{lost.parent.name}", len(before["measurements"])
    points = len(before["curves"])
    as_before = (
        f"{name}: {numbers} of {numbers} numbers and {points} of {points} points of the curve as "
        "before, at "
    )
    assert result.stdout.splitlines() == [
        f"finished {name}",
        f"{as_before}{before['origin']['commit']}",
    ]
    assert after["measurements"] == before["measurements"]
    assert after["curves"] == before["curves"]
    assert all(path.read_bytes() == content for path, content in results.items())


def test_wrong_name_is_refused_in_one_line(finished, shared_data):
    result = study(
        "",
        "--data",
        shared_data,
        "--out",
        finished,
        "--results",
        finished / "results",
        "--only",
        "mlcd:1",
    )
    assert result.returncode == 2
    assert result.stderr.startswith("no run is called mlcd:1: ")
    assert result.stderr.count("\n") == 1


def test_wrong_folder_is_refused_in_one_line(tmp_path):
    result = study("", "--data", tmp_path, "--out", tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("there is no tiny_imagenet_pretrain in ")
    assert result.stderr.count("\n") == 1
