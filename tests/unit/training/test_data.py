import numpy as np
import pytest
import torch

from training.config import AugmentConfig
from training.data.augment import augment
from training.data.order import batch_positions, sample_rows
from training.optim.schedule import learning_rate


def test_every_epoch_shows_every_sample_once_across_batch_borders():
    rows = np.concatenate([sample_rows(batch_positions(step, 7), 10, seed=0) for step in range(10)])
    for epoch in range(7):
        assert sorted(rows[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert rows[:10].tolist() != rows[10:20].tolist()


def test_the_order_does_not_depend_on_the_batch_size():
    small = np.concatenate([sample_rows(batch_positions(step, 3), 10, seed=4) for step in range(8)])
    assert small.tolist() == sample_rows(batch_positions(0, 24), 10, seed=4).tolist()


def test_augmentation_follows_the_position_and_not_the_batch():
    pixels = torch.randint(0, 256, (6, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    positions = np.arange(30, 36)
    whole = augment(pixels, positions, image_size=16, config=AugmentConfig(), seed=0)
    alone = augment(pixels[2:3], positions[2:3], image_size=16, config=AugmentConfig(), seed=0)
    assert torch.equal(whole[2:3], alone)
    assert whole.shape == (6, 3, 16, 16)
    assert whole.min() >= 0
    assert whole.max() <= 255


def test_without_randomness_it_is_a_plain_resize():
    gradient = torch.arange(20).view(1, 1, 1, 20).expand(1, 3, 20, 20).to(torch.uint8)
    still = AugmentConfig(min_area=1.0, max_aspect=1.0, flip=0.0)
    same = augment(gradient, np.array([5]), image_size=20, config=still, seed=0)
    assert torch.allclose(same, gradient.float(), atol=1e-3)
    mirrored = augment(gradient, np.array([5]), image_size=20, config=still.model_copy(update={"flip": 1.0}), seed=0)
    assert torch.allclose(mirrored, gradient.float().flip(3), atol=1e-3)


def test_the_schedule_warms_up_and_ends_at_zero():
    def lr(step):
        return learning_rate(step, peak=2.0, warmup_steps=10, num_steps=110)

    assert lr(0) == pytest.approx(0.2)
    assert lr(9) == lr(10) == 2.0
    assert lr(60) == pytest.approx(1.0)
    assert lr(110) == 0.0
    assert learning_rate(0, peak=1.0, warmup_steps=0, num_steps=1) == 1.0
