"""Tables of runs that several states made."""

import json

import pyarrow.parquet as pq
import pytest

from studies.losses.run import Study
from studies.losses.table import Repeated, gather
from studies.losses.tiers import TIERS

RUN, OTHER = "report/mlcd-seed1-lr0.001-s16-r1-steps12", "report/mlcd-seed2-lr0.001-s16-r1-steps12"


def result(name, *, commit="first", value=0.5, loss=2.0):
    measured = {"set": "cifar10_jpg", "task": "class", "metric": "knn"}
    cosines = {"positive_cosine": 0.1, "negative_cosine": 0.0}
    return {
        "name": name,
        "stage": "report",
        "arm": "mlcd",
        "seed": 1,
        "setting": {"lr": 0.001},
        "variant": {},
        "steps": 12,
        "threads": 1,
        "train_s": 1.0,
        "train_cpu_s": 1.0,
        "evaluation_s": 1.0,
        "origin": {"cpu": "a cpu", "commit": commit},
        "measurements": [
            {**measured, "value": value},
            {**measured, "metric": "linear_probe", "value": 0.25},
        ],
        "curves": [{**cosines, "step": 6.0, "loss": 3.0}, {**cosines, "step": 12.0, "loss": loss}],
    }


@pytest.fixture
def state(tmp_path):
    """A new state with one finished run, each time."""

    def make(name, **options):
        study = Study(
            TIERS["toy"], tmp_path / "data", tmp_path / f"state-{len(list(tmp_path.iterdir()))}"
        )
        folder = study.state / "runs" / name
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(result(name, **options)))
        return study

    return make


def rows(folder, column, kind=""):
    table = pq.read_table(folder / f"toy{kind}.parquet").to_pylist()
    return [(row["run"], row[column]) for row in table]


def test_runs_of_other_states_are_kept(state, tmp_path):
    results = tmp_path / "results"
    assert gather(state(RUN), results) == []
    assert gather(state(OTHER, value=0.75), results) == []
    assert rows(results, "value") == [(RUN, 0.5), (RUN, 0.25), (OTHER, 0.75), (OTHER, 0.25)]
    assert rows(results, "step", "-curves") == [(RUN, 6), (RUN, 12), (OTHER, 6), (OTHER, 12)]


def test_a_run_made_again_replaces_its_numbers_and_is_held_against_them(state, tmp_path):
    results = tmp_path / "results"
    gather(state(RUN), results)
    gather(state(OTHER), results)
    again = state(RUN, commit="second")
    assert gather(again, results) == [Repeated(RUN, "first", 2, 2, 2, 2)]
    assert gather(again, results) == []
    assert gather(state(RUN, commit="third", value=0.5000001, loss=2.5), results) == [
        Repeated(RUN, "second", 1, 2, 1, 2)
    ]
    assert rows(results, "value") == [(RUN, 0.5000001), (RUN, 0.25), (OTHER, 0.5), (OTHER, 0.25)]
    assert rows(results, "commit") == [(RUN, "third")] * 2 + [(OTHER, "first")] * 2


def test_a_column_that_came_later_is_kept_with_rows_that_lack_it(state, tmp_path):
    results = tmp_path / "results"
    gather(state(RUN), results)
    study = state(OTHER)
    path = study.state / "runs" / OTHER / "result.json"
    later = result(OTHER)
    later["origin"]["memory"] = "24 GiB"
    path.write_text(json.dumps(later))
    gather(study, results)
    assert rows(results, "memory") == [(RUN, None)] * 2 + [(OTHER, "24 GiB")] * 2


def test_it_is_told_in_one_line():
    told = str(Repeated(RUN, "first", 13, 14, 48, 48))
    assert told == f"{RUN}: 13 of 14 numbers and 48 of 48 points of the curve as before, at first"
