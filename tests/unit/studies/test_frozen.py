"""The frozen tier of the study: its probe against brute force, its runs repeated, its table."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mlcd.errors import InvalidInput
from mlcd.types import unit_rows
from studies.losses.frozen.arms import NAMED, NAMED_SEEDS, Arm, FeaturesRun, FrozenRun, all_runs
from studies.losses.frozen.features import TEACHERS, Teacher
from studies.losses.frozen.run import perform
from studies.losses.hardware import origin
from studies.losses.instrument.asked import (
    _PENALTIES,
    Asked,
    AskedTags,
    mean_precision,
    neighbors_right,
    probe,
    tag_votes,
    tags_right,
)
from studies.losses.instrument.heads import (
    FirstRows,
    clustered,
    nearest_labels,
    scaled,
    train_head,
)
from studies.losses.instrument.rows import gather, read_rows, table_of, write_row
from training.evaluation.knn import count_votes


@pytest.fixture(scope="module")
def teacher():
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((12, 24)).astype(np.float32)

    def drawn(num):
        classes = rng.integers(0, 12, num)
        noise = rng.standard_normal((num, 24)).astype(np.float32)
        return unit_rows(directions[classes] + noise), classes

    asked = tuple(Asked(name, *drawn(60)) for name in ("held_out", "other"))
    return Teacher("toy", drawn(400)[0], asked)


def test_every_run_has_one_name_and_named_arms_have_all_seeds():
    runs = list(all_runs())
    assert len({run.name for run in runs}) == len(runs)
    assert runs[0].name == "mobilenet/features"
    trained = [run for run in runs if isinstance(run, FrozenRun)]
    for teacher in TEACHERS:
        for arm in NAMED.values():
            seeds = {run.seed for run in trained if (run.teacher, run.arm) == (teacher, arm)}
            assert seeds >= set(NAMED_SEEDS)


def test_rates_of_learning_are_times_those_of_the_recipes(teacher, tmp_path):
    def learned(**rates):
        arm = Arm(learned=True, labels=4, clusters=12, steps=20, **rates)
        return perform(FrozenRun("toy", arm, 3), teacher, tmp_path).numbers

    slow, fast, both = learned(), learned(scalar_rate=30.0), learned(rate=3.0)
    start = np.log(16)
    assert abs(fast["end_log_scale"] - start) > 10 * abs(slow["end_log_scale"] - start)
    assert abs(both["end_log_scale"] - start) > 2 * abs(slow["end_log_scale"] - start)
    assert both["positive_cosine"] != slow["positive_cosine"]


def test_features_are_asked_as_they_are(teacher, tmp_path):
    found = perform(FeaturesRun("toy"), teacher, tmp_path)
    first = neighbors_right(teacher.asked[0].rows, teacher.asked[0])
    assert (found.right[:60] == first).all()
    assert found.numbers["knn_held_out"] == first.mean()


def test_a_learned_bias_begins_where_few_classes_are_positive():
    arm = Arm(learned=True)
    assert arm.first_bias == pytest.approx(-np.log(1000 / 8))
    assert replace(arm, kind="mlc").first_bias == 0


def test_the_probe_leaves_each_image_out():
    rng = np.random.default_rng(1)
    classes = rng.integers(0, 3, 40)
    rows = (np.eye(3)[classes] @ rng.standard_normal((3, 6)) + rng.standard_normal((40, 6))).astype(
        np.float32
    )
    best = 0.0
    for penalty in _PENALTIES:
        right = 0
        for left_out in range(40):
            known = np.arange(40) != left_out
            x, y = rows[known].astype(float), np.eye(3)[classes[known]]
            design = np.hstack([x, np.ones((39, 1))])
            bound = np.diag([penalty * 40] * 6 + [0.0])
            weights = np.linalg.solve(design.T @ design + bound, design.T @ y)
            right += (np.append(rows[left_out], 1) @ weights).argmax() == classes[left_out]
        best = max(best, right / 40)
    assert probe(rows, classes) == best


def test_votes_for_tags_are_those_for_classes_where_each_image_has_one():
    rng = np.random.default_rng(2)
    classes = rng.integers(0, 4, 50)
    rows = unit_rows(rng.standard_normal((50, 8)).astype(np.float32))
    rows[7] = rows[8] = rows[9]
    tags = np.eye(4, dtype=bool)[classes]
    votes = count_votes(rows, rows, classes, num_classes=4, neighbors=5, itself=np.arange(50))
    assert tag_votes(rows, tags) == pytest.approx(votes)
    asked = AskedTags("toy", rows, tags)
    assert (tags_right(rows, asked) == (votes.argmax(axis=1) == classes)).all()
    assert 0.2 < mean_precision(rows, asked) < 0.8
    assert mean_precision(tags.astype(np.float32), asked) == 1.0


@pytest.mark.parametrize("kind", ["cd", "mlcd"])
def test_a_run_is_repeated_to_the_last_bit(kind, teacher, tmp_path):
    run = FrozenRun("toy", Arm(kind, labels=1 if kind == "cd" else 4, clusters=12, steps=40), 3)
    one, other = (perform(run, teacher, tmp_path / name) for name in "ab")
    timed = {"cluster_s", "train_s", "evaluation_s"}
    assert [one.numbers[name] for name in one.numbers if name not in timed] == [
        other.numbers[name] for name in other.numbers if name not in timed
    ]
    assert (one.right == other.right).all()
    assert len(one.right) == 120
    assert one.numbers["positive_cosine"] > one.numbers["negative_cosine"]


@pytest.mark.parametrize("kind", ["per_column", "bce"])
def test_a_loss_of_an_earlier_trainer_is_not_trained(kind):
    with pytest.raises(InvalidInput, match=f"one of mlcd, mlc, cd, got {kind}"):
        Arm(kind).head(1)


def test_a_classifier_from_centers_starts_where_labels_point(teacher, tmp_path):
    """After one short step the nearest row of a classifier from centers is still the label."""
    ends = {}
    for start in ("wide", "centers"):
        arm = Arm(start=start, labels=4, clusters=12, steps=40)
        run = FrozenRun("toy", arm, 3)
        assert run.name == f"toy/mlcd-labels=4-clusters=12-steps=40-start={start}/seed3"
        ends[start] = perform(run, teacher, tmp_path)
    wide, from_centers = (ends[start].numbers["positive_cosine"] for start in ends)
    assert wide != from_centers
    stored = nearest_labels(teacher.training, 12, 3, tmp_path / "clustering.npy")
    centers = clustered(teacher.training, 12, 3)
    head = train_head(
        scaled(teacher.training),
        torch.from_numpy(stored[:, :4]).contiguous(),
        Arm(labels=4, clusters=12, steps=1, start="centers"),
        3,
        FirstRows(teacher.training.shape[1], centers),
    ).head
    nearest = (teacher.training @ head.unit_centers().numpy().T).argmax(axis=1)
    assert (nearest == stored[:, 0]).all()


def test_rows_are_gathered_beside_those_of_other_states(teacher, tmp_path):
    runs = [FrozenRun("toy", Arm(clusters=12, labels=2, steps=5), seed) for seed in (1, 2)]
    outcome = perform(runs[0], teacher, tmp_path / "work")
    write_row("frozen", runs[0], outcome, replace(origin(), commit="before"), tmp_path / "first")
    assert list(gather("frozen", [], tmp_path / "first", tmp_path)) == []
    for run in runs:
        write_row("frozen", run, outcome, replace(origin(), commit="now"), tmp_path / "second")
    (line,) = gather("frozen", [], tmp_path / "second", tmp_path)
    assert line.startswith("toy/mlcd-labels=2-clusters=12-steps=5/seed1: ")
    same, _, num = line.split(": ")[1].split()[:3]
    assert same == num
    assert list(gather("frozen", [], tmp_path / "second", tmp_path)) == []
    again = replace(outcome, numbers=outcome.numbers | {"train_s": 99.0})
    write_row("frozen", runs[0], again, replace(origin(), commit="now"), tmp_path / "third")
    (line,) = gather("frozen", [], tmp_path / "third", tmp_path)
    machine = origin()
    assert f"at now on {machine.cpu} ({machine.instructions})" in line
    rows = read_rows(table_of("frozen", tmp_path))
    assert [row["seed"] for row in rows] == [1, 2]
    bits = np.unpackbits(np.frombuffer(rows[0]["right"], np.uint8), count=120).astype(bool)
    assert (bits == outcome.right).all()
    other = replace(outcome, numbers=outcome.numbers | {"positive_cosine": 2.0})
    elsewhere = replace(machine, instructions="another")
    write_row("frozen", runs[0], other, elsewhere, tmp_path / "fourth")
    (line,) = gather("frozen", [], tmp_path / "fourth", tmp_path)
    assert "fields as before, not positive_cosine, at now" in line


def test_rows_of_a_time_when_a_run_had_fewer_fields_get_them(tmp_path):
    run = FrozenRun("toy", Arm(steps=5), 1)
    old = run.fields | {"start": None}
    pq.write_table(
        pa.Table.from_pylist([{"run": run.name, **old}, {"run": "toy/unknown", "start": "wide"}]),
        table_of("frozen", tmp_path),
    )
    assert list(gather("frozen", [run], tmp_path / "state", tmp_path)) == []
    rows = read_rows(table_of("frozen", tmp_path))
    assert [row["start"] for row in rows] == ["random", "wide"]
