import numpy as np
import pytest
import torch

from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.losses.negatives import draw_negatives, hash_classes, own_positions
from mlcd.losses.positives import distinct_labels
from mlcd.randomness import hash_counters


def test_the_hash_is_that_of_the_core_in_unsigned_order():
    ids = torch.arange(1000)
    for seed, step in ((0, 0), (5, 123_456), (-1, 7)):
        ours = hash_classes(seed, step, ids).numpy()
        theirs = hash_counters(seed, 3, step, np.arange(1000))
        assert ((ours.view(np.uint64) ^ np.uint64(1 << 63)) == theirs).all()
        assert (np.argsort(ours) == np.argsort(theirs)).all()


def test_the_draw_has_the_stated_size_and_no_class_twice():
    drawn = draw_negatives(1001, 0.1, seed=0, step=5)
    assert len(drawn) == len(drawn.unique()) == 100
    assert (drawn.diff() > 0).all()
    assert draw_negatives(1001, 1.0, seed=0, step=5).tolist() == list(range(1001))
    assert len(draw_negatives(5, 0.01, seed=0, step=0)) == 1


def test_the_draw_follows_seed_and_step_and_nothing_else():
    first = draw_negatives(1000, 0.1, seed=1, step=2)
    assert torch.equal(first, draw_negatives(1000, 0.1, seed=1, step=2, labels=torch.tensor([[3]])))
    assert not torch.equal(first, draw_negatives(1000, 0.1, seed=1, step=3))
    assert not torch.equal(first, draw_negatives(1000, 0.1, seed=2, step=2))


def test_classes_are_drawn_uniformly():
    counts = np.zeros(200)
    for step in range(2000):
        counts[draw_negatives(200, 0.1, seed=0, step=step)] += 1
    # Chi-square of draws without replacement, 199 degrees of freedom, p = 0.001.
    assert ((counts - 200) ** 2 / (200 * 0.9)).sum() < 266


def test_no_pattern_repeats_over_shards():
    """One stream reused on every process would draw the same local rows of each shard."""
    drawn = draw_negatives(4000, 0.25, seed=0, step=0)
    shards = [
        set((drawn[(drawn >= first) & (drawn < first + 1000)] - first).tolist()) for first in range(0, 4000, 1000)
    ]
    for first, second in ((0, 1), (1, 2), (2, 3)):
        common = len(shards[first] & shards[second])
        assert 30 < common < 95  # 62.5 expected of independent quarters


def test_partialfc_takes_the_positives_and_fills_up():
    labels = torch.tensor([[3, 900, -1], [17, 3, -1]])
    drawn = draw_negatives(1000, 0.1, seed=0, step=0, policy="partialfc", labels=labels)
    assert len(drawn) == 100
    assert {3, 17, 900} <= set(drawn.tolist())
    many = torch.arange(300).view(30, 10)
    assert draw_negatives(1000, 0.1, seed=0, step=0, policy="partialfc", labels=many).tolist() == list(range(300))


def test_own_positions_are_found_and_padding_hits_nothing():
    drawn = torch.tensor([0, 3, 5, 9])
    labels = torch.tensor([[3, 9, -1], [4, -1, -1], [0, 5, -1], [11, 1, -1]])
    rows, slots = own_positions(drawn, labels)
    assert sorted(zip(rows.tolist(), slots.tolist(), strict=True)) == [(0, 1), (0, 3), (2, 0), (2, 2)]
    assert (slots.diff() >= 0).all()
    assert len(own_positions(torch.tensor([], dtype=torch.int64), labels)[0]) == 0


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1])
def test_an_impossible_ratio_is_refused(ratio):
    with pytest.raises(ConfigInvalid):
        draw_negatives(10, ratio, seed=0, step=0)


def test_labels_are_distinct_checked_and_exact():
    labels = torch.tensor([[5, 2, 5, -1], [-1, -1, -1, -1], [16_777_217, 16_777_216, 0, 0]])
    cleaned = distinct_labels(labels, 20_000_000)
    assert [sorted(row[row >= 0].tolist()) for row in cleaned] == [[2, 5], [], [0, 16_777_216, 16_777_217]]
    with pytest.raises(InvalidInput, match="sample 2 has label 16777217"):
        distinct_labels(labels, 16_777_217)
    with pytest.raises(InvalidInput, match="sample 0 has label -2"):
        distinct_labels(torch.tensor([[-2]]), 5)
    with pytest.raises(InvalidInput, match="int64"):
        distinct_labels(labels.float(), 20_000_000)
