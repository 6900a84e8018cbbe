"""The scales tier: where scalars begin, pairs of a batch, gradient norms, and repeated runs."""

import math

import numpy as np
import pytest

from mlcd.types import unit_rows
from studies.losses.frozen.arms import NAMED_SEEDS, SWEEP_SEEDS
from studies.losses.frozen.features import Teacher
from studies.losses.frozen.run import perform_arm
from studies.losses.hardware import origin
from studies.losses.instrument.asked import Asked
from studies.losses.instrument.rows import Outcome, write_row
from studies.losses.scales.arms import (
    BATCHES,
    NAMED_LEARNED,
    LearnedArm,
    PairArm,
    ScalesRun,
    all_scales_runs,
    learned_arms,
    pair_arms,
)
from studies.losses.scales.pairs import _batches, norms_over_time, perform_pairs, split_pairs


def test_every_run_has_one_name_and_named_arms_have_all_seeds():
    runs = list(all_scales_runs())
    assert len({run.name for run in runs}) == len(runs)
    for arm in (*NAMED_LEARNED.values(), *pair_arms()):
        assert {run.seed for run in runs if run.arm == arm} == set(NAMED_SEEDS)
    assert set(NAMED_LEARNED.values()) < set(learned_arms())
    assert all(
        set(SWEEP_SEEDS) <= {run.seed for run in runs if run.arm == arm} for arm in learned_arms()
    )


def test_a_bias_begins_where_it_says():
    of_start = {arm.start: arm.first_bias for arm in learned_arms() if arm.clusters == 1000}
    assert of_start == {
        "zero": 0,
        "rk": pytest.approx(-math.log(1000)),
        "rkl": pytest.approx(-math.log(125)),
    }
    fixed, both = (LearnedArm(learned).head(1) for learned in ("none", "both"))
    assert (fixed.learn_scale, fixed.learn_bias) == (False, False)
    assert (both.learn_scale, both.learn_bias) == (True, True)
    assert PairArm("siglip", 32).head.bias == pytest.approx(-math.log(31))


def test_every_batch_size_sees_as_many_pairs():
    assert {arm.steps * arm.batch for arm in pair_arms()} == {122_880}
    assert {arm.batch for arm in pair_arms()} == set(BATCHES)


def test_no_pair_is_twice_in_a_step():
    batches = _batches(70, PairArm("clip", 32, samples=32 * 7), 1)
    assert batches.shape == (7, 32)
    assert all(len(set(batch)) == 32 for batch in batches.tolist())
    assert len(set(batches[:2].flatten().tolist())) == 64


def test_gradient_norms_are_kept_at_equal_parts_of_a_run():
    found = norms_over_time([float(step) for step in range(120)])
    assert found["gradient_norms"][:2] == [0.5, 2.5]
    assert found["gradient_peaks"][-1] == 119
    assert len(found["gradient_norms"]) == 60
    assert found["gradient_norm"] == pytest.approx(59.5)
    assert norms_over_time([3.0, 1.0])["gradient_norms"] == [3.0, 1.0]


@pytest.fixture(scope="module")
def pairs():
    rng = np.random.default_rng(0)
    meant = rng.standard_normal((20, 6))
    captions = np.repeat(np.arange(20), 10)
    images, texts = (
        (meant[captions] @ rng.standard_normal((6, dim)) + 0.3 * rng.standard_normal((200, dim)))
        for dim in (16, 12)
    )
    trained = np.arange(200) % 10 < 7
    return split_pairs(images.astype(np.float32), texts.astype(np.float32), captions, trained)


def test_both_parts_lose_the_mean_of_what_is_trained_on():
    rows = np.array([[1.0, 0.0], [3.0, 0.0], [2.0, 5.0]], np.float32)
    found = split_pairs(rows, rows, np.arange(3), np.array([True, True, False]))
    assert found.training.images.tolist() == [[-1, 0], [1, 0]]
    assert found.asked.texts.tolist() == [[0, 1]]


@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_a_run_on_pairs_is_repeated_to_the_last_bit_and_learns(loss, pairs, tmp_path):
    arm = PairArm(loss, 32, samples=32 * 60)
    one, other = (perform_pairs(arm, 3, pairs) for _ in range(2))
    for name, value in one.numbers.items():
        assert name.endswith("_s") or value == other.numbers[name]
    assert (one.right == other.right).all()
    assert one.right.shape == (120,)
    untrained = perform_pairs(PairArm(loss, 32, samples=32), 3, pairs)
    assert one.numbers["retrieval"] > untrained.numbers["retrieval"] + 0.2
    assert one.numbers["retrieval"] == pytest.approx(one.right.mean())
    assert perform_pairs(arm, 4, pairs).numbers["end_loss"] != one.numbers["end_loss"]
    write_row("scales", ScalesRun(arm, 3), one, origin(), tmp_path)
    clash = Outcome(one.numbers | {"batch": 1.0}, one.right)
    with pytest.raises(ValueError, match="'batch'"):
        write_row("scales", ScalesRun(arm, 3), clash, origin(), tmp_path)


def test_scalars_of_pairs_move_at_their_own_rate(pairs):
    def moved(scalar_rate):
        arm = PairArm("clip", 32, samples=32 * 20, scalar_rate=scalar_rate)
        return abs(math.log(perform_pairs(arm, 3, pairs).numbers["end_scale"] * 0.07))

    assert moved(30.0) > 10 * moved(1.0)


def test_learned_scalars_are_in_the_row_and_fixed_ones_are_not(tmp_path):
    rng = np.random.default_rng(0)
    rows = unit_rows(rng.standard_normal((160, 24)).astype(np.float32))
    teacher = Teacher("toy", rows, (Asked("held_out", rows[:40], rng.integers(0, 4, 40)),))
    fixed, learned = (
        perform_arm(LearnedArm(kind, "rk", clusters=12, labels=3, steps=20), 1, teacher, tmp_path)
        for kind in ("none", "both")
    )
    assert "end_log_scale" not in fixed.numbers
    assert learned.numbers["end_log_scale"] != pytest.approx(math.log(16), abs=1e-6)
    assert learned.numbers["end_bias"] != pytest.approx(-math.log(12), abs=1e-6)
