"""Order, mixtures, join and augmentation."""

import io
import math
import shutil
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mlcd.embeddings import EmbeddingsArtifact
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.labels.table import LabelTable
from mlcd.randomness import permuted
from training.config import AugmentConfig, RunConfig, load_config
from training.data.augment import augment
from training.data.dataset import open_dataset
from training.data.order import BLOCK, block_shares, locate, own_part, part_counts, part_indices, step_positions
from training.data.squares import squash
from training.optim.schedule import learning_rate


@given(num=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_permuted_is_a_permutation_of_any_number(num, seed, epoch):
    assert sorted(permuted(np.arange(num), num, seed, epoch)) == list(range(num))


def test_permuted_costs_nothing_for_what_is_not_asked():
    num = 400_000_000
    positions = np.random.default_rng(0).integers(0, num, 50_000)
    reached = permuted(positions, num, 1, 2)
    assert reached.min() >= 0
    assert reached.max() < num
    assert len(np.unique(reached)) == len(np.unique(positions))
    assert np.array_equal(permuted(positions[:7], num, 1, 2), reached[:7])
    # Even, and without memory of the position.
    assert np.histogram(reached, 20, (0, num))[0] == pytest.approx(np.full(20, 2500), abs=5 * 50)
    assert abs(np.corrcoef(positions, reached)[0, 1]) < 0.03


@pytest.mark.parametrize("num", [2, 3, 5, 12])
def test_every_element_goes_everywhere_and_pairs_are_torn(num):
    trials = 4000
    drawn = np.stack([permuted(np.arange(num), num, seed, 0) for seed in range(trials)])
    for position in range(num):
        counts = np.bincount(drawn[:, position], minlength=num)
        assert counts == pytest.approx(np.full(num, trials / num), abs=5 * math.sqrt(trials / num))
    if num > 3:
        neighbors = ((drawn[:, 1] - drawn[:, 0]) % num == 1).mean()
        assert neighbors == pytest.approx(1 / (num - 1), abs=5 * math.sqrt(1 / num / trials))


def test_every_epoch_shows_every_sample_once_across_batch_borders():
    rows = np.concatenate([locate(step_positions(step, 7), [10], [1.0], seed=0)[1] for step in range(10)])
    for epoch in range(7):
        assert sorted(rows[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert rows[:10].tolist() != rows[10:20].tolist()
    other = locate(np.arange(10), [10], [1.0], seed=1)[1]
    assert other.tolist() != rows[:10].tolist()


@pytest.mark.parametrize(("sizes", "weights"), [([10], [1.0]), ([300, 50, 7], [1.0, 3.0, 0.5])])
def test_the_order_does_not_depend_on_batch_size_processes_or_where_it_is_resumed(sizes, weights):
    end = 3 * BLOCK
    whole = np.stack(locate(np.arange(end), sizes, weights, 4))
    for batch_size in (96, 1024):
        steps = [
            np.stack(locate(step_positions(step, batch_size), sizes, weights, 4)) for step in range(end // batch_size)
        ]
        assert np.array_equal(np.concatenate(steps, axis=1), whole)
    for size in (1, 2, 3, 8):
        own = [np.arange(96)[own_part(96, rank, size)] + 5000 for rank in range(size)]
        parts = [np.stack(locate(positions, sizes, weights, 4)) for positions in own]
        assert np.array_equal(np.concatenate(parts, axis=1), whole[:, 5000:5096])


@given(num=st.integers(0, 100), size=st.integers(1, 20))
def test_shares_of_the_ranks_are_balanced_and_complete(num, size):
    shares = [list(range(num))[own_part(num, rank, size)] for rank in range(size)]
    assert list(chain.from_iterable(shares)) == list(range(num))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_mixture_is_exact_and_its_parts_run_through_their_own_epochs():
    sizes, weights = [1000, 37, 5000], [2.0, 1.0, 1.0]
    parts, rows = locate(np.arange(4 * BLOCK), sizes, weights, seed=9)
    for block in range(4):
        counts = np.bincount(parts[block * BLOCK : (block + 1) * BLOCK])
        assert counts.tolist() == [BLOCK // 2, BLOCK // 4, BLOCK // 4]
    for part, size in enumerate(sizes):
        own = rows[parts == part]
        for start in range(0, len(own) - size, size):
            assert sorted(own[start : start + size]) == list(range(size))
    # Spread, not in runs: every batch holds some of each.
    assert min(np.bincount(parts[start : start + 128], minlength=3).min() for start in range(0, BLOCK, 128)) > 10


def test_shares_are_by_largest_remainder():
    assert block_shares([1, 1, 1]).tolist() == [1366, 1365, 1365]
    assert block_shares([0.7, 0.2, 0.1]).tolist() == [2867, 819, 410]
    with pytest.raises(ConfigInvalid, match=r"data\.mix\.1\.weight=1e-06"):
        block_shares([1.0, 1e-6])


def test_how_many_of_each_part_come_before_is_closed_form():
    weights = [1.0, 3.0, 0.5]
    parts, indices = part_indices(np.arange(2 * BLOCK + 100), weights, seed=3)
    for position in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 99):
        expected = [(parts[:position] == part).sum() for part in range(3)]
        assert part_counts(position, weights, 3).tolist() == expected
        assert indices[position] == expected[parts[position]]


def gradient(aspect, side=80, dtype=torch.uint8):
    """A squashed picture of that aspect: red grows with x, green with y, blue is even."""
    ramp = torch.arange(side, dtype=torch.float64) * 3
    picture = torch.stack([ramp[None, :].expand(side, side), ramp[:, None].expand(side, side), torch.ones(side, side)])
    return picture[None].to(dtype), torch.tensor([aspect], dtype=torch.float32)


@pytest.mark.parametrize(("width", "height"), [(400, 400), (800, 400), (300, 900), (500, 333)])
def test_crop_boxes_are_of_the_picture_before_it_was_squashed(width, height):
    """The slope of a gradient tells how many of the picture's pixels each pixel of the crop spans."""
    config = AugmentConfig(min_area=0.3, max_aspect=1.5, flip=0.0)
    image, aspect = gradient(width / height, dtype=torch.float64)
    size = 40
    seen = []
    for position in range(200):
        crop = augment(image, aspect, np.array([position]), image_size=size, config=config, seed=1)[0]
        # Inside, away from the border's reflection: value per pixel of the crop, times size, in shares of the side.
        share_x = float(crop[0, 20, 30] - crop[0, 20, 10]) / 20 * size / (3 * 80)
        share_y = float(crop[1, 30, 20] - crop[1, 10, 20]) / 20 * size / (3 * 80)
        assert crop[2] == pytest.approx(np.ones((size, size)))
        seen.append((share_x * width, share_y * height))
    box_width, box_height = np.array(seen).T
    assert box_width.max() <= width * (1 + 1e-9)
    assert box_height.max() <= height * (1 + 1e-9)
    inside = (box_width < width * (1 - 1e-9)) & (box_height < height * (1 - 1e-9))
    area, ratio = (box_width * box_height / (width * height))[inside], (box_width / box_height)[inside]
    assert area.min() >= 0.3 - 1e-9
    assert area.max() <= 1 + 1e-9
    assert ratio.min() >= 1 / 1.5 - 1e-9
    assert ratio.max() <= 1.5 + 1e-9
    if width == height:
        assert area.mean() == pytest.approx(0.6, abs=0.06)
        assert np.log(ratio).mean() == pytest.approx(0, abs=0.07)
    else:  # what cannot be as tall or wide as it should is as tall or wide as the picture
        assert (~inside).any()


def test_places_are_uniform():
    config = AugmentConfig(min_area=0.25, max_aspect=1.0, flip=0.0)
    image, aspect = gradient(1.0, dtype=torch.float64)
    num = 400
    crops = augment(
        image.expand(num, -1, -1, -1), aspect.expand(num), np.arange(num), image_size=2, config=config, seed=0
    )
    centers = crops[:, :2].mean(dim=(2, 3)) / (3 * 79)
    assert centers.mean(dim=0) == pytest.approx([0.5, 0.5], abs=0.03)
    assert centers.min() < 0.35
    assert centers.max() > 0.65


def test_without_randomness_it_is_a_plain_resize():
    image, aspect = gradient(1.0)
    still = AugmentConfig(min_area=1.0, max_aspect=1.0, flip=0.0)
    same = augment(image, aspect, np.array([5]), image_size=80, config=still, seed=0)
    assert same.dtype == torch.float32
    assert torch.allclose(same, image.float(), atol=1e-3)
    mirrored = augment(
        image, aspect, np.array([5]), image_size=80, config=still.model_copy(update={"flip": 1.0}), seed=0
    )
    assert torch.allclose(mirrored, image.float().flip(3), atol=1e-3)


def test_half_are_mirrored():
    image, aspect = gradient(1.0)
    config = AugmentConfig(min_area=1.0, max_aspect=1.0, flip=0.5)
    crops = augment(
        image.expand(400, -1, -1, -1), aspect.expand(400), np.arange(400), image_size=8, config=config, seed=0
    )
    assert (crops[:, 0, 0, 0] > crops[:, 0, 0, -1]).float().mean() == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_augmentation_follows_the_position_and_not_the_batch_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (33, 3, 20, 20), dtype=torch.uint8, generator=generator).to(dtype)
    aspects = torch.rand(33, generator=generator) + 0.5
    positions = np.arange(30, 63)

    def crops(rows):
        return augment(pixels[rows], aspects[rows], positions[rows], image_size=16, config=AugmentConfig(), seed=0)

    whole = crops(slice(None))
    assert whole.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(whole, torch.cat([crops(slice(start, start + 1)) for start in range(33)]))
    assert torch.equal(whole, torch.cat([crops(slice(0, 7)), crops(slice(7, 33))]))
    assert whole.shape == (33, 3, 16, 16)
    assert whole.min() >= 0
    assert whole.max() <= 255
    assert crops(slice(0, 0)).shape == (0, 3, 16, 16)


def test_a_squashed_picture_is_the_whole_of_it_upright():
    picture = np.zeros((40, 80, 3), dtype=np.uint8)
    picture[:, 40:] = 200
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees: what is on the left in the file is at the top
    Image.fromarray(picture).save(buffer, "PNG", exif=exif)
    square, aspect = squash(buffer.getvalue(), 20, "exact")
    assert square.shape == (3, 20, 20)
    assert aspect == 0.5
    assert square[:, :8].max() == 0
    assert square[:, 12:].min() == 200


def test_fast_decoding_shows_nearly_the_same(photo):
    exact, aspect = squash(photo, 40, "exact")
    fast, same_aspect = squash(photo, 40, "fast")
    assert aspect == same_aspect == pytest.approx(640 / 427)
    assert not np.array_equal(exact, fast)
    assert np.abs(exact.astype(int) - fast.astype(int)).mean() < 2


@pytest.fixture
def config(labeled, digits, tiny_recipe, tmp_path):
    def make(*overrides):
        places = [f"data.images={digits}", f"data.labels={labeled / 'labels'}", f"out={tmp_path / 'run'}"]
        return load_config(str(tiny_recipe), [*places, *overrides])

    return make


def test_labels_and_images_are_joined_by_key_and_the_held_out_stay_out(config, labeled):
    features = EmbeddingsArtifact.open(labeled / "features")
    out = {key for key, held in zip(features.keys, features.held_out(0.2), strict=True) if held}
    assert 30 < len(out) < 50
    dataset = open_dataset(config())
    (part,) = dataset.parts
    table = LabelTable.open(labeled / "labels")
    row_of_key = table.row_of_key()
    assert {entry.key for entry in part.entries} == set(features.keys) - out
    assert len(dataset) == len(part) == 200 - len(out)
    for entry, labels, sha256 in zip(part.entries, part.labels, part.sha256, strict=True):
        assert labels.tolist() == table.ids[row_of_key[entry.key], :2].tolist()
        assert sha256.tobytes() == table.image_sha256[row_of_key[entry.key]]
    assert part.labels.dtype == np.int32
    assert (dataset.num_unlabeled, dataset.num_missing, dataset.num_centers) == (0, 0, table.num_centers)
    assert len(open_dataset(config("data.hold_out=0"))) == 200
    assert open_dataset(config("loss.kind=cd")).parts[0].labels.shape[1] == 1


def test_images_without_labels_and_labels_without_images_are_counted(config, digits, tmp_path, caplog):
    images = tmp_path / "images"
    shutil.copytree(digits, images)
    first, second, *_ = sorted((images / "3").iterdir())
    shutil.copy(first, images / "3" / "new.png")
    second.unlink()
    dataset = open_dataset(config(f"data.images={images}", "data.hold_out=0"))
    assert (len(dataset), dataset.num_unlabeled, dataset.num_missing) == (199, 1, 1)
    assert "1 images labeled in" in caplog.text


def test_images_and_labels_that_share_nothing_are_refused(config, tmp_path):
    (tmp_path / "other").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "other" / "a.png")
    with pytest.raises(InvalidInput, match="were the labels made from these images"):
        open_dataset(config(f"data.images={tmp_path / 'other'}", "data.hold_out=0"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="there are no images in"):
        open_dataset(config(f"data.images={tmp_path / 'empty'}"))


def mixture(config, *sources):
    mix = [{"images": str(images), "labels": str(labels), "weight": weight} for images, labels, weight in sources]
    return RunConfig.model_validate({**config().model_dump(), "data": {"mix": mix}})


def test_a_mixture_has_a_part_for_each_source(config, digits, labeled):
    labels = labeled / "labels"
    dataset = open_dataset(mixture(config, (digits, labels, 1), (digits, labels, 3)))
    assert dataset.weights == (1, 3)
    assert len(dataset.parts[0]) == len(dataset.parts[1]) == len(dataset) / 2
    assert len(dataset.label_tables) == 2


def test_a_mixture_of_other_centers_is_refused(config, digits, labeled, tmp_path):
    commands = [
        ["cluster", labeled / "features", tmp_path / "centers", "--clusters", 5, "--seed", 1],
        ["label", labeled / "features", tmp_path / "labels", "--centers", tmp_path / "centers", "--top", 2],
    ]
    for command in commands:
        subprocess.run([sys.executable, "-m", "mlcd", *map(str, command)], check=True, capture_output=True)
    with pytest.raises(ConfigInvalid, match="labels of different centers"):
        open_dataset(mixture(config, (digits, labeled / "labels", 1), (digits, tmp_path / "labels", 1)))


def test_a_part_that_would_never_be_seen_is_refused(config, digits, labeled):
    with pytest.raises(ConfigInvalid, match=r"data\.mix\.1\.weight"):
        open_dataset(mixture(config, (digits, labeled / "labels", 1), (digits, labeled / "labels", 1e-7)))


def test_the_schedule_warms_up_and_ends_at_zero():
    def lr(step):
        return learning_rate(step, peak=2.0, warmup_steps=10, num_steps=110)

    assert lr(0) == pytest.approx(0.2)
    assert lr(9) == lr(10) == 2.0
    assert lr(60) == pytest.approx(1.0)
    assert lr(110) == 0.0
    assert learning_rate(0, peak=1.0, warmup_steps=0, num_steps=1) == 1.0
