import numpy as np
import pytest
import torch

from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.losses.negatives import draw_negatives, hash_classes, own_slots
from mlcd.losses.positives import check_labels, distinct_labels
from mlcd.randomness import Stream, hash_counters
from mlcd.training.data.augment import crop_boxes
from mlcd.training.data.augment_config import AugmentConfig
from mlcd.training.data.drawing import draw_labels
from mlcd.training.data.order import BLOCK, locate, part_indices


def test_the_hash_is_that_of_the_core_in_unsigned_order():
    ids = torch.arange(1000)
    for seed, step in ((0, 0), (5, 123_456), (-1, 7)):
        ours = hash_classes(seed, step, ids).numpy()
        theirs = hash_counters(seed, Stream.NEGATIVES, step, np.arange(1000))
        assert ((ours.view(np.uint64) ^ np.uint64(1 << 63)) == theirs).all()
        assert (np.argsort(ours) == np.argsort(theirs)).all()


def test_negatives_draw_no_number_that_something_else_of_the_run_draws(monkeypatch):
    """The order of samples, mixtures, crops and drawn labels of seeds, epochs, blocks and positions
    up to 20.
    """
    seen = {}

    def watched(*counters):
        numbers = hash_counters(*counters)
        for number in numbers.flat:
            seen.setdefault(int(number), []).append(counters)
        return numbers

    monkeypatch.setattr("mlcd.randomness.hash_counters", watched)
    for seed in range(3):
        part_indices(np.arange(20 * BLOCK), [1.0, 2.0], seed)
        locate(np.arange(40), [2], [1.0], seed)
        draw_labels(np.zeros((20, 10), np.int32), np.arange(20), 8, seed)
        crop_boxes(np.full(20, 300), np.full(20, 200), np.arange(20), AugmentConfig(), seed)
    assert len(seen) > 1000
    for seed in range(3):
        for step in range(20):
            drawn = hash_classes(seed, step, torch.arange(20)).numpy().view(np.uint64)
            assert not {int(number) for number in drawn ^ np.uint64(1 << 63)} & seen.keys()


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
        set((drawn[(drawn >= first) & (drawn < first + 1000)] - first).tolist())
        for first in range(0, 4000, 1000)
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
    assert draw_negatives(
        1000, 0.1, seed=0, step=0, policy="partialfc", labels=many
    ).tolist() == list(range(300))


def test_own_slots_are_found_and_padding_hits_nothing():
    drawn = torch.tensor([0, 3, 5, 9])
    labels = torch.tensor([[3, 9, -1], [4, -1, -1], [0, 5, -1], [11, 1, -1]])
    nowhere = -5
    assert own_slots(drawn, labels).tolist() == [
        [1, 3, nowhere],
        [nowhere, nowhere, nowhere],
        [0, 2, nowhere],
        [nowhere, nowhere, nowhere],
    ]
    assert (own_slots(torch.tensor([], dtype=torch.int64), labels) == -1).all()


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1])
def test_an_impossible_ratio_is_refused(ratio):
    with pytest.raises(ConfigInvalid):
        draw_negatives(10, ratio, seed=0, step=0)


def test_labels_are_distinct_checked_and_exact():
    labels = torch.tensor([[5, 2, 5, -1], [-1, -1, -1, -1], [16_777_217, 16_777_216, 0, 0]])
    check_labels(labels, 20_000_000)
    cleaned = distinct_labels(labels)
    assert cleaned.tolist() == [[5, 2, -1, -1], [-1, -1, -1, -1], [16_777_217, 16_777_216, 0, -1]]
    with pytest.raises(InvalidInput, match="got 16777217 for sample 2"):
        check_labels(labels, 16_777_217)
    with pytest.raises(InvalidInput, match="got -2 for sample 0"):
        check_labels(torch.tensor([[-2]]), 5)
    with pytest.raises(InvalidInput, match="int64"):
        check_labels(labels.float(), 20_000_000)
