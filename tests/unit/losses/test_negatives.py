import numpy as np
import pytest
import torch

from mlcd.errors import ConfigInvalid
from mlcd.losses.negatives import independent_negatives, mask_own_positives


def test_the_draw_has_the_stated_size_and_no_class_twice():
    drawn = independent_negatives(1001, 0.1, seed=0, step=5)
    assert len(drawn) == len(set(drawn)) == 100
    assert (np.diff(drawn) > 0).all()
    assert (independent_negatives(1001, 1.0, seed=0, step=5) == np.arange(1001)).all()
    assert len(independent_negatives(5, 0.01, seed=0, step=0)) == 1


def test_the_draw_follows_seed_and_step_and_nothing_else():
    first = independent_negatives(1000, 0.1, seed=1, step=2)
    assert (first == independent_negatives(1000, 0.1, seed=1, step=2)).all()
    assert (first != independent_negatives(1000, 0.1, seed=1, step=3)).any()
    assert (first != independent_negatives(1000, 0.1, seed=2, step=2)).any()


def test_classes_are_drawn_uniformly():
    counts = np.zeros(200)
    for step in range(2000):
        counts[independent_negatives(200, 0.1, seed=0, step=step)] += 1
    # Chi-square of draws without replacement, 199 degrees of freedom, p = 0.001.
    assert ((counts - 200) ** 2 / (200 * 0.9)).sum() < 266


def test_own_positives_are_masked_and_padding_hits_nothing():
    class_ids = torch.tensor([0, 3, 5, 9])
    labels = torch.tensor([[3, 9, -1], [4, -1, -1], [0, 0, 5], [11, 1, -1]])
    masked = mask_own_positives(torch.zeros(4, 4), class_ids, labels) == -torch.inf
    assert masked.tolist() == [
        [False, True, False, True],
        [False, False, False, False],
        [True, False, True, False],
        [False, False, False, False],
    ]


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1])
def test_an_impossible_ratio_is_refused(ratio):
    with pytest.raises(ConfigInvalid):
        independent_negatives(10, ratio, seed=0, step=0)
