"""The study's decisions: which runs are due, what a pair of arms differs by, which images are
judged.
"""

import math

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel

from mlcd.errors import ConfigInvalid
from mlcd.keys import HELD_OUT_FRACTION, mask_held_out
from studies.losses import hardware
from studies.losses.arms import (
    CLUSTER_ARMS,
    INSTANCE_ARMS,
    UNTRAINED,
    RunSpec,
    default_setting,
    grid,
)
from studies.losses.instance import InstanceLoss
from studies.losses.measure import measure_majority
from studies.losses.plan import FROM_KMEANS, FROM_RANDOM, due, known, tuning
from studies.losses.sets import EvaluationSet, split_of
from studies.losses.statistics import in_points, interval, paired_difference
from studies.losses.tiers import TIERS

TIER = TIERS["cpu"]


def everything(score):
    """All runs of the tier in the order in which they would be done, each scored as it is."""
    scores = {}
    while (spec := next(due(TIER, scores), None)) is not None:
        assert spec.name not in scores
        scores[spec.name] = score(spec)
    return scores


def by_rate(spec):
    return spec.setting.lr + spec.setting.scale / 1e6 + (spec.setting.ratio or 0) / 1e9


def test_every_arm_is_tuned_with_the_same_number_of_runs():
    names = list(everything(by_rate))
    for arm in (*CLUSTER_ARMS, *INSTANCE_ARMS):
        assert sum(name.startswith(f"tune/{arm}-") for name in names) == grid(arm).num_runs == 5


def test_tuning_seed_is_not_reported():
    assert TIER.tune_seed not in TIER.seeds
    assert len(TIER.seeds) >= 4


def test_tuning_takes_each_value_at_the_best_so_far():
    scores = everything(by_rate)
    specs, chosen = tuning(TIER, "mlcd", scores)
    assert [spec.setting.scale for spec in specs] == [8, 16, 32, 32, 32]
    assert [spec.setting.lr for spec in specs] == [1e-3, 1e-3, 1e-3, 2e-3, 2e-3]
    assert (chosen.lr, chosen.scale, chosen.ratio) == (2e-3, 32, 1.0)


def test_what_stands_goes_before_its_equals():
    _, chosen = tuning(TIER, "mlcd", everything(lambda spec: 0.1))
    assert chosen == default_setting("mlcd")


def test_every_arm_has_every_seed_at_its_tuned_setting():
    scores = everything(by_rate)
    for arm in (*CLUSTER_ARMS, *INSTANCE_ARMS):
        _, chosen = tuning(TIER, arm, scores)
        for seed in TIER.seeds:
            assert f"report/{arm}-seed{seed}-{chosen}-steps{TIER.steps}" in scores


def test_recipe_setting_is_not_run_twice_where_tuning_keeps_it():
    def prefers_default(spec):
        return float(spec.setting == default_setting(spec.arm))

    reported = [spec for spec in known(TIER, everything(prefers_default)) if spec.stage == "report"]
    assert len(reported) == len(TIER.seeds) * (len(CLUSTER_ARMS) + len(INSTANCE_ARMS) + 1)
    assert sum(spec.arm == UNTRAINED for spec in reported) == len(TIER.seeds)


def test_only_names_of_different_runs_differ():
    specs = list(known(TIER, everything(by_rate)))
    assert len({spec.name for spec in specs}) == len(specs) == len(set(specs))


def test_every_run_is_told_by_its_name():
    for spec in known(TIER, everything(by_rate)):
        assert RunSpec.parse(spec.name) == spec


@pytest.mark.parametrize(
    "name",
    [
        "mlcd:1",
        "report/mlcd-seed1",
        "report/none-seed1-lr0.001-s8-r1-steps480",
        "report/mlcd-seed1-lr0.0010-s8-r1-steps480",
        "report/mlcd-seed1-lr0.001-s8-r1-steps480-labels=8",
        "sweep/mlcd-seed1-lr0.001-s8-r1-steps480-colors=3",
        "sweep/mlcd-seed1-lr0.001-s8-r1-steps480-labels",
        "report/mlcd-seed1-lr0.001-s8-steps480",
        "report/instance_softmax-seed1-lr0.001-s8-r1-steps480",
        "report/mlcd-seed1-lr1.2.3-s8-r1-steps480",
        "",
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(ConfigInvalid, match="no run is called"):
        RunSpec.parse(name)


def test_a_run_names_every_commit_that_worked_on_it(tmp_path, monkeypatch):
    told = []
    for commit in ("one", "one", "two", "two"):
        monkeypatch.setattr(hardware, "_commit", lambda commit=commit: commit)
        told.append(hardware.origin_so_far(tmp_path / "origin.json").commit)
    assert told == ["one", "one", "one then two", "one then two"]


def test_majority_needs_no_image():
    images = set_of(400)
    classes, known = np.array(images.columns["class"]), ~images.test
    names, counts = np.unique(classes[known], return_counts=True)
    expected = (classes[images.test] == names[counts.argmax()]).mean()
    assert [(each.metric, each.value) for each in measure_majority(images)] == [
        ("knn", pytest.approx(expected)),
        ("linear_probe", pytest.approx(expected)),
    ]


def test_every_sweep_changes_something_of_a_reported_run():
    specs = list(known(TIER, everything(by_rate)))
    reported = {
        (spec.arm, spec.setting, spec.steps, spec.variant)
        for spec in specs
        if spec.stage == "report"
    }
    sweeps = [spec for spec in specs if spec.stage == "sweep"]
    assert not reported & {(spec.arm, spec.setting, spec.steps, spec.variant) for spec in sweeps}
    assert all(spec.seed == TIER.seeds[0] or is_repeated(spec) for spec in sweeps)
    for seed in TIER.seeds:
        again = [spec for spec in sweeps if spec.seed == seed and is_repeated(spec)]
        assert {spec.arm for spec in again if spec.steps > TIER.steps} == set(CLUSTER_ARMS)
        assert {spec.variant for spec in again if spec.steps == TIER.steps} == {
            FROM_RANDOM,
            FROM_KMEANS,
        }


def is_repeated(spec):
    return spec.steps > TIER.steps or spec.variant in (FROM_RANDOM, FROM_KMEANS)


def test_paired_interval_is_that_of_the_t_test():
    first, second = (
        {1: 0.31, 2: 0.30, 3: 0.35, 4: 0.33},
        {4: 0.30, 2: 0.29, 1: 0.32, 3: 0.31, 9: 0.9},
    )
    found = paired_difference(first, second)
    seeds = [1, 2, 3, 4]
    test = ttest_rel(
        [first[seed] for seed in seeds], [second[seed] for seed in seeds]
    ).confidence_interval(0.95)
    assert found.n == 4
    assert found.mean - found.half_width == pytest.approx(test.low)
    assert found.mean + found.half_width == pytest.approx(test.high)


def test_one_pair_has_no_interval():
    found = interval([0.02])
    assert math.isnan(found.half_width)
    assert in_points(found) == "+2.0 (n = 1)"
    assert not found.is_clear


def test_differences_are_written_in_points():
    assert in_points(interval([0.010, 0.012, 0.011, 0.011])) == "**+1.1 ± 0.1**"
    assert in_points(interval([0.05, -0.02, 0.01, 0.0])) == "+1.0 ± 4.7"
    assert in_points(interval([-0.0001] * 4)) == "**+0.0 ± 0.0**"


def test_two_equal_differences_are_no_interval():
    assert in_points(interval([0.01, 0.01])) == "+1.0 (n = 2)"
    assert not interval([0.01, 0.01]).is_clear
    assert interval([0.01] * 4).is_clear


def set_of(num, test_share=0.3):
    generator = np.random.default_rng(0)
    classes = tuple(generator.choice(["a", "b", "c"], num).tolist())
    keys = tuple(f"{number}.jpg" for number in range(num))
    return EvaluationSet(
        "toy", "nowhere", keys, generator.random(num) < test_share, {"class": classes}
    )


def test_hold_out_takes_just_the_test_images():
    images = set_of(200)
    splits = split_of(images.keys, images.columns["class"], images.test)
    np.testing.assert_array_equal(mask_held_out(splits, HELD_OUT_FRACTION), images.test)


def test_classes_without_enough_known_images_are_left_out():
    classes = ("common",) * 20 + ("other",) * 20 + ("rare",) * 3
    test = np.array(([True] * 5 + [False] * 15) * 2 + [True, False, False])
    images = EvaluationSet("toy", "nowhere", tuple(map(str, range(43))), test, {"class": classes})
    samples = images.samples("class", np.arange(43, dtype=np.float32)[:, None])
    assert set(samples.class_names) == {"common", "other"}
    np.testing.assert_array_equal(samples.rows[:, 0], np.arange(40))
    np.testing.assert_array_equal(mask_held_out(samples.splits, HELD_OUT_FRACTION), test[:40])


@pytest.mark.parametrize("kind", INSTANCE_ARMS)
def test_instance_loss_falls_when_the_two_views_of_each_image_agree(kind):
    generator = torch.Generator().manual_seed(0)
    first = torch.nn.functional.normalize(torch.randn((32, 16), generator=generator), dim=1)
    loss = InstanceLoss(kind, scale=10.0, batch_size=32)
    assert loss(first, first) < loss(first, first.roll(1, dims=0)) - 1
