"""The towers tier: its runs and settings, and toy towers from pixels, repeated to the last bit."""

import json
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

from mlcd.errors import InvalidInput
from studies.losses.frozen.features import PRETRAINING, Features
from studies.losses.instrument import slices
from studies.losses.instrument.asked import ASKED
from studies.losses.instrument.rows import Outcome, path_of
from studies.losses.towers.arms import (
    BIASED,
    CHANGED_ARMS,
    INSTANCE_ARMS,
    NO_TEACHER,
    ON_CPU,
    ON_GPU,
    SAME_VIEWS,
    SCALED_ARMS,
    TOWER_ARMS,
    TOWER_TEACHERS,
    TowerRun,
    TowerSize,
    all_tower_runs,
    first_round,
)
from studies.losses.towers.run import Towers, opened_sets, perform_tower, resting
from training.config import load_config
from training.head.loss_config import LossKind

EVERY_ARM = {**TOWER_ARMS, **SCALED_ARMS, **CHANGED_ARMS}
EVERY_ARM = {name: arm for name, arm in EVERY_ARM.items() if arm.kind in get_args(LossKind)}
TOY = TowerSize(
    overrides=(
        "model.patch_size=8",
        "model.width=32",
        "model.depth=1",
        "model.heads=2",
        "model.mlp_width=64",
        "model.embedding_dim=16",
        "schedule.batch_size=16",
        "optim.warmup_steps=2",
    ),
    steps=6,
    clusters=12,
    image_size=16,
    checkpoint_steps=4,
)


def test_every_run_has_one_name_and_every_arm_all_seeds():
    runs = list(all_tower_runs(ON_CPU))
    assert len({run.name for run in runs}) == len(runs) == 20 * 12 + 2 * 8
    for teacher in TOWER_TEACHERS:
        for arm in TOWER_ARMS.values():
            found = {run.seed for run in runs if (run.teacher, run.arm) == (teacher, arm)}
            more = teacher == "mobilenet" and arm in (TOWER_ARMS["MLCD"], TOWER_ARMS["CD"])
            assert found == set(range(1, 21 if more else 13))
    scaled = [run for run in runs if run.arm in SCALED_ARMS.values()]
    assert {(run.teacher, run.seed) for run in scaled} == {
        (teacher, seed) for teacher in ("mobilenet", "hog") for seed in range(1, 13)
    }
    assert {run.arm for run in runs if run.teacher == NO_TEACHER} == set(INSTANCE_ARMS.values())


def test_partial_results_are_balanced_and_the_headline_comes_first():
    runs = list(all_tower_runs(ON_CPU))
    first = runs[: 4 * 12]
    assert {run.teacher for run in first} == {"mobilenet"}
    assert [run.seed for run in first] == sorted(run.seed for run in first)
    assert {run.arm for run in first[:4]} == {
        TOWER_ARMS[name] for name in ("MLCD", "MLC", "CD", BIASED)
    }
    for seed in ON_CPU.seeds:
        of_own = TowerRun("own", TOWER_ARMS["MLCD"], seed)
        assert runs.index(first_round(seed)) < runs.index(of_own)


@pytest.mark.parametrize("name", [*EVERY_ARM])
@pytest.mark.parametrize("size", [ON_CPU, ON_GPU])
def test_every_arm_is_a_valid_recipe(name, size):
    arm = EVERY_ARM[name]
    paths = ["out=o", "data.images=i", "data.labels=l", f"schedule.steps={size.steps}"]
    config = load_config("small", [*size.overrides, *arm.overrides, *paths])
    assert config.loss.kind == arm.kind
    assert config.loss.scale == arm.scale
    assert config.loss.num_labels == arm.labels
    assert (config.loss.negative_ratio, config.loss.bias or 0.0) == (1.0, arm.bias)
    assert config.augment.views == 1
    if name == SAME_VIEWS:
        assert config.augment.min_area == 0.2
        assert min(config.augment.hue, config.augment.blur, config.augment.grayscale) > 0
    else:
        assert (config.augment.min_area, config.augment.hue, config.augment.blur) == (0.5, 0, 0)


@pytest.mark.parametrize("arm", [TOWER_ARMS["per_column"], *INSTANCE_ARMS.values()])
def test_a_loss_of_an_earlier_trainer_is_not_trained(arm):
    with pytest.raises(InvalidInput, match=f"one of mlcd, mlc, cd, got {arm.kind}"):
        list(arm.overrides)


def test_the_resting_point_is_that_of_the_last_points(tmp_path):
    lines = [{"step": step, "loss": 1.0, "positive_cosine": step / 10, "negative_cosine": 0.0,
              "scale": step} for step in range(1, 11)]  # fmt: skip
    lines.append({"step": 11, "knn": 0.3})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = resting(tmp_path / "metrics.jsonl")
    assert found == pytest.approx({"positive_cosine": 0.8, "negative_cosine": 0.0, "end_scale": 10})


@pytest.fixture
def towers(tmp_path, monkeypatch):
    """Returns a maker of toy towers; each set is a few classes of their own color, in folders."""
    rng = np.random.default_rng(0)
    for name in (PRETRAINING, *ASKED):
        for number in range(4):
            folder = tmp_path / "data" / name / f"class{number}"
            folder.mkdir(parents=True)
            color = rng.integers(0, 255, 3)
            for each in range(20 if name == PRETRAINING else 7):
                noise = rng.integers(-60, 60, (24, 24, 3))
                pixels = np.clip(color + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{each}.png")
    for module in ("frozen.features", "towers.run"):
        monkeypatch.setattr(f"studies.losses.{module}.SHARDS", PRETRAINING)
    before = torch.get_num_threads()
    features = Features(tmp_path / "data", tmp_path / "frozen")
    yield lambda name: Towers(features, tmp_path / name, TOY)
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)
    opened_sets.cache_clear()


def test_a_run_is_repeated_to_the_last_bit(towers):
    run = TowerRun("hog", TOWER_ARMS["MLC"], 3)
    one, other = (perform_tower(run, towers(name)) for name in "ab")
    assert (one.right == other.right).all()
    assert len(one.right) > 4 * 28
    for name, value in one.numbers.items():
        assert name.endswith("_s") or value == other.numbers[name]
    assert {"knn_held_out", "probe_cifar10_jpg", "positive_cosine"} < set(one.numbers)
    assert one.scratch == towers("a").folder(run)


@pytest.mark.slow
def test_the_own_teacher_is_the_first_round_of_its_seed(towers):
    toy = towers("a")
    own = perform_tower(TowerRun("own", TOWER_ARMS["CD"], 3), toy)
    assert (toy.folder(first_round(3)) / "run").is_dir()
    assert (toy.state / "labels" / "own" / "seed3" / "labels").is_dir()
    hog = perform_tower(TowerRun("hog", TOWER_ARMS["CD"], 3), toy)
    assert own.numbers["positive_cosine"] != hog.numbers["positive_cosine"]


def test_what_a_run_leaves_is_deleted_once_its_row_is_kept(tmp_path):
    class Tier:
        name, state = "towers", tmp_path / "state"

        def perform(self, run):
            (tmp_path / "scratch").mkdir()
            return Outcome({"knn": 0.5}, np.ones(8, bool), tmp_path / "scratch")

    run = TowerRun("hog", TOWER_ARMS["MLC"], 3)
    assert slices._perform_one(run, Tier(), None) == f"finished {run.name}"
    assert path_of(run, Tier.state).is_file()
    assert not (tmp_path / "scratch").exists()
