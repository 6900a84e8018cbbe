"""Order, mixtures, join and augmentation."""

import io
import math
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import ks_2samp

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.labels import LabelTable, write_part
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.progress import Reporter
from mlcd.randomness import permute_positions
from mlcd.training.config import RunConfig
from mlcd.training.data.augment import Augmentation, crop_boxes
from mlcd.training.data.augment_config import AugmentConfig
from mlcd.training.data.crops import crop_pictures
from mlcd.training.data.dataset import open_dataset
from mlcd.training.data.order import (
    BLOCK,
    block_shares,
    locate,
    own_part,
    part_counts,
    part_indices,
    step_positions,
)
from mlcd.training.data.pictures import open_picture, picture_side
from mlcd.training.optim.schedule import learning_rate
from mlcd.training.run.run_training import run_training
from mlcd.types import Neighbors
from tests.unit.training.running import configured


@given(num=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_permuted_is_a_permutation_of_any_number(num, seed, epoch):
    assert sorted(permute_positions(np.arange(num), num, seed, epoch)) == list(range(num))


def test_permuted_costs_nothing_for_what_is_not_asked():
    num = 400_000_000
    positions = np.random.default_rng(0).integers(0, num, 50_000)
    reached = permute_positions(positions, num, 1, 2)
    assert reached.min() >= 0
    assert reached.max() < num
    assert len(np.unique(reached)) == len(np.unique(positions))
    assert np.array_equal(permute_positions(positions[:7], num, 1, 2), reached[:7])
    # Even, and without memory of the position.
    assert np.histogram(reached, 20, (0, num))[0] == pytest.approx(np.full(20, 2500), abs=5 * 50)
    assert abs(np.corrcoef(positions, reached)[0, 1]) < 0.03


@pytest.mark.parametrize("num", [2, 3, 5, 12])
def test_every_element_goes_everywhere_and_pairs_are_torn(num):
    trials = 4000
    drawn = np.stack([permute_positions(np.arange(num), num, seed, 0) for seed in range(trials)])
    for position in range(num):
        counts = np.bincount(drawn[:, position], minlength=num)
        assert counts == pytest.approx(np.full(num, trials / num), abs=5 * math.sqrt(trials / num))
    if num > 3:
        neighbors = ((drawn[:, 1] - drawn[:, 0]) % num == 1).mean()
        assert neighbors == pytest.approx(1 / (num - 1), abs=5 * math.sqrt(1 / num / trials))


def test_every_epoch_shows_every_sample_once_across_batch_borders():
    rows = np.concatenate(
        [locate(step_positions(step, 7), [10], [1.0], seed=0)[1] for step in range(10)]
    )
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
            np.stack(locate(step_positions(step, batch_size), sizes, weights, 4))
            for step in range(end // batch_size)
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
    assert (
        min(
            np.bincount(parts[start : start + 128], minlength=3).min()
            for start in range(0, BLOCK, 128)
        )
        > 10
    )


def test_shares_are_by_largest_remainder():
    assert block_shares([1, 1, 1]).tolist() == [1366, 1365, 1365]
    assert block_shares([0.7, 0.2, 0.1]).tolist() == [2867, 819, 410]
    with pytest.raises(ConfigInvalid, match=r"data\.mix\.1\.weight must be .*, got 1e-06"):
        block_shares([1.0, 1e-6])


def test_how_many_of_each_part_come_before_is_closed_form():
    weights = [1.0, 3.0, 0.5]
    parts, indices = part_indices(np.arange(2 * BLOCK + 100), weights, seed=3)
    for position in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 99):
        expected = [(parts[:position] == part).sum() for part in range(3)]
        assert part_counts(position, weights, 3).tolist() == expected
        assert indices[position] == expected[parts[position]]


# Large: torchvision's boxes are of whole pixels, ours are not.
SIZES = [
    (6000, 2000),
    (6000, 4000),
    (4000, 4000),
    (2000, 6000),
]


def torchvision_box(width, height, config, generator):
    """Draws as torchvision's RandomResizedCrop.get_params, which cannot be imported beside this
    torch.
    """
    for _ in range(10):
        area = width * height * generator.uniform(config.min_area, 1.0)
        aspect = math.exp(
            generator.uniform(-math.log(config.max_aspect), math.log(config.max_aspect))
        )
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return (
                int(generator.integers(width - w + 1)),
                int(generator.integers(height - h + 1)),
                w,
                h,
            )
    if width / height < 1 / config.max_aspect:
        w, h = width, round(width * config.max_aspect)
    elif width / height > config.max_aspect:
        w, h = round(height * config.max_aspect), height
    else:
        w, h = width, height
    return (width - w) // 2, (height - h) // 2, w, h


def boxes_of(width, height, config, num, seed=3):
    boxes = crop_boxes(np.full(num, width), np.full(num, height), np.arange(num), config, seed)
    return np.stack([boxes.left, boxes.top, boxes.width, boxes.height], axis=1), boxes.mirrored


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize(("min_area", "max_aspect"), [(0.08, 4 / 3), (0.7, 1.25), (0.9, 4 / 3)])
def test_crop_boxes_are_distributed_as_torchvision_s(width, height, min_area, max_aspect):
    config = AugmentConfig(min_area=min_area, max_aspect=max_aspect)
    num = 3000
    ours, _ = boxes_of(width, height, config, num)
    generator = np.random.default_rng(1)
    theirs = np.array([torchvision_box(width, height, config, generator) for _ in range(num)])
    for boxes in (ours, theirs):
        left, top, w, h = boxes.T
        assert (left >= 0).all()
        assert (top >= 0).all()
        assert (left + w <= width * (1 + 1e-12)).all()
        assert (top + h <= height * (1 + 1e-12)).all()
        slack = 1.0 / min(w.min(), h.min())  # a box has whole pixels
        assert (w / h).max() <= max_aspect * (1 + slack)
        assert (w / h).min() >= 1 / max_aspect * (1 - slack)
    # Less than half a percent of the picture's sides blurs what a whole pixel makes of the boxes in
    # the middle.
    sides = np.array([width, height, width, height])
    mine, other = (
        boxes + generator.uniform(-0.005, 0.005, boxes.shape) * sides for boxes in (ours, theirs)
    )
    mine, other = (
        np.column_stack([b, b[:, 2] * b[:, 3], b[:, 2] / b[:, 3]]) for b in (mine, other)
    )
    for column, name in enumerate(("left", "top", "width", "height", "area", "aspect")):
        assert ks_2samp(mine[:, column], other[:, column], method="asymp").pvalue > 1e-4, name


def test_half_are_mirrored():
    _, mirrored = boxes_of(100, 100, AugmentConfig(flip=0.5), 1000)
    assert mirrored.mean() == pytest.approx(0.5, abs=0.05)
    assert not boxes_of(100, 100, AugmentConfig(flip=0.0), 100)[1].any()
    assert boxes_of(100, 100, AugmentConfig(flip=1.0), 100)[1].all()


def encoded(pixels, kind="PNG", **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def random_picture(width, height, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_a_crop_follows_the_position_and_not_the_batch_bit_for_bit():
    pictures = [
        open_picture(encoded(random_picture(30 + n, 60 - n, n)), 100, "exact") for n in range(33)
    ]
    positions = list(range(30, 63))
    augmentation = Augmentation(16, AugmentConfig(min_area=0.1, max_aspect=1.3), 0)
    (whole,) = crop_pictures(pictures, positions, augmentation)
    assert (whole.shape, whole.dtype) == ((33, 3, 16, 16), torch.uint8)
    alone = [
        crop_pictures(pictures[n : n + 1], positions[n : n + 1], augmentation)[0] for n in range(33)
    ]
    assert torch.equal(whole, torch.cat(alone))
    (other,) = crop_pictures(pictures, positions, Augmentation(16, augmentation.config, 1))
    assert not torch.equal(whole, other)
    assert crop_pictures([], [], augmentation)[0].shape == (0, 3, 16, 16)


def test_more_views_are_further_draws_and_leave_the_first_as_it_is():
    pictures = [open_picture(encoded(random_picture(60, 50, n)), 100, "exact") for n in range(9)]
    positions = list(range(9))
    area = {"min_area": 0.4, "local_area": (0.1, 0.2)}
    one, several = (
        crop_pictures(pictures, positions, Augmentation(16, AugmentConfig(**area, **views), 3))
        for views in ({}, {"views": 2, "local_views": 2, "local_size": 8})
    )
    assert [view.shape[-1] for view in several] == [16, 16, 8, 8]
    assert torch.equal(several[0], one[0])
    for a, b in ((0, 1), (2, 3)):
        assert not any(torch.equal(*pair) for pair in zip(several[a], several[b], strict=True))


def test_local_boxes_are_distributed_as_torchvision_s_and_drawn_apart_from_the_others():
    config = AugmentConfig(max_aspect=4 / 3, local_views=1, local_size=8, local_area=(0.05, 0.32))
    num, side = 3000, 4000
    sizes, positions = np.full(num, side), np.arange(num)
    first, local = (crop_boxes(sizes, sizes, positions, config, 3, view) for view in (0, 1))
    generator = np.random.default_rng(1)
    areas = generator.uniform(0.05, 0.32, num)
    ratios = np.exp(generator.uniform(-math.log(4 / 3), math.log(4 / 3), num))
    assert ks_2samp(local.width * local.height / side**2, areas).pvalue > 1e-3
    assert ks_2samp(local.width / local.height, ratios).pvalue > 1e-3
    for name in ("left", "width", "height"):
        assert abs(np.corrcoef(getattr(first, name), getattr(local, name))[0, 1]) < 0.08


def test_without_randomness_it_is_a_plain_resize():
    pixels = random_picture(50, 50)
    picture = open_picture(encoded(pixels), 80, "exact")
    for flip in (0.0, 1.0):
        still = Augmentation(20, AugmentConfig(min_area=1.0, max_aspect=1.0, flip=flip), 0)
        ((crop,),) = crop_pictures([picture], [5], still)
        expected = np.asarray(
            Image.fromarray(pixels).resize((20, 20), Image.Resampling.BICUBIC)
        ).transpose(2, 0, 1)
        assert np.array_equal(crop.numpy(), expected[:, :, ::-1] if flip else expected)


def test_crops_of_a_picture_that_is_not_square_are_not_squeezed():
    """Rings stay round: in a crop, the slope of a gradient is as steep down as across, up to the
    drawn aspect.
    """
    y, x = np.mgrid[:225, :400]
    pixels = np.stack([x * 255 / 400, y * 255 / 400, 0 * x], axis=2).astype(np.uint8)
    picture = open_picture(encoded(pixels), 400, "exact")
    (crops,) = crop_pictures(
        [picture] * 50, list(range(50)), Augmentation(32, AugmentConfig(flip=0.0), 0)
    )
    crops = crops.double()
    across = crops[:, 0, 16, 28] - crops[:, 0, 16, 4]
    down = crops[:, 1, 28, 16] - crops[:, 1, 4, 16]
    assert ((across / down) < 1.25 * 1.05).all()
    assert ((across / down) > 1 / 1.25 / 1.05).all()


@pytest.mark.parametrize("size", [32, 64, 224])
def test_small_crops_are_as_sharp_as_those_of_the_original(shared_data, size):
    """Root mean square of neighbors' differences, of crops of 8 % of photographs, against one
    resize of the original.
    """
    config = AugmentConfig(min_area=0.08, max_aspect=1.0, flip=0.0)
    ratios = []
    for number, path in enumerate(sorted((shared_data / "caltech101_20").rglob("*.jpg"))[::40]):
        image = Image.open(path).convert("RGB")
        picture = open_picture(encoded(np.asarray(image)), picture_side(size, config), "exact")
        # The seed of which this position's box is one of the smallest.
        seed = min(
            range(30), key=lambda seed: np.prod(boxes_at(image.size, number, config, seed)[2:])
        )
        left, top, w, h = boxes_at(image.size, number, config, seed)
        direct = image.resize(
            (size, size), Image.Resampling.BICUBIC, box=(left, top, left + w, top + h)
        )
        ((crop,),) = crop_pictures([picture], [number], Augmentation(size, config, seed))
        ratios.append(sharpness(crop.numpy().transpose(1, 2, 0)) / sharpness(np.asarray(direct)))
    assert len(ratios) >= 15
    assert min(ratios) > 0.95
    assert max(ratios) < 1.05


def boxes_at(size, position, config, seed):
    boxes = crop_boxes(np.array([size[0]]), np.array([size[1]]), np.array([position]), config, seed)
    return [float(values[0]) for values in (boxes.left, boxes.top, boxes.width, boxes.height)]


def sharpness(pixels):
    gray = pixels.astype(np.float64).mean(axis=2)
    return math.sqrt((np.diff(gray, axis=0) ** 2).mean() + (np.diff(gray, axis=1) ** 2).mean())


def test_a_picture_is_the_whole_of_it_upright_and_no_larger_than_needed():
    pixels = np.zeros((40, 80, 3), dtype=np.uint8)
    pixels[:, 40:] = 200
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees: what is on the left in the file is at the top
    data = encoded(pixels, exif=exif)
    for side, shape in ((100, (80, 40, 3)), (20, (29, 15, 3))):
        picture = open_picture(data, side, "exact")
        assert (picture.width, picture.height) == (40, 80)
        assert picture.pixels.shape == shape
        assert picture.pixels[: shape[0] // 2 - 3].max() == 0
        assert picture.pixels[shape[0] // 2 + 3 :].min() == 200


@pytest.fixture
def config(labeled, digits, tiny_recipe, tmp_path):
    def make(*overrides):
        return configured(tiny_recipe, digits, labeled / "labels", tmp_path / "run", *overrides)

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
    assert (dataset.num_unlabeled, dataset.num_missing, dataset.num_centers) == (
        0,
        0,
        table.num_centers,
    )
    assert len(open_dataset(config("data.hold_out=0"))) == 200
    assert open_dataset(config("loss.kind=cd")).parts[0].labels.shape[1] == 1


def test_images_without_labels_and_labels_without_images_are_counted(
    config, digits, tmp_path, caplog
):
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
    with pytest.raises(InvalidInput, match="give the images that the labels were made from"):
        open_dataset(config(f"data.images={tmp_path / 'other'}", "data.hold_out=0"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="must hold images"):
        open_dataset(config(f"data.images={tmp_path / 'empty'}"))


def mixture(config, *sources):
    mix = [
        {"images": str(images), "labels": str(labels), "weight": weight}
        for images, labels, weight in sources
    ]
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
        [
            "label",
            labeled / "features",
            tmp_path / "labels",
            "--centers",
            tmp_path / "centers",
            "--top",
            2,
        ],
    ]
    for command in commands:
        subprocess.run(
            [sys.executable, "-m", "mlcd", *map(str, command)], check=True, capture_output=True
        )
    with pytest.raises(ConfigInvalid, match="must have labels of the same"):
        open_dataset(
            mixture(config, (digits, labeled / "labels", 1), (digits, tmp_path / "labels", 1))
        )


@pytest.mark.parametrize("column", [0, 1])
def test_a_label_beyond_the_centers_is_refused_by_name_before_the_first_step(
    config, labeled, tmp_path, column
):
    table = LabelTable.open(labeled / "labels")
    ids = table.ids.copy()
    ids[17, column] = 10
    key = table.keys[17]
    with Draft(tmp_path / "labels", table.artifact.request()) as draft:
        scores = np.ones(ids.shape, dtype=np.float32)
        write_part(draft, 0, table.keys, table.image_sha256, Neighbors(ids=ids, scores=scores))
        draft.publish(summary=table.artifact.summary)
    run = config(f"data.labels={tmp_path / 'labels'}")
    with pytest.raises(
        InvalidInput, match=rf"labels must name one of its 10 centers, got 10 for {key}"
    ):
        run_training(run, Reporter("silent"))
    assert not Path(run.out + ".partial").exists()


def test_the_schedule_warms_up_and_ends_at_zero():
    def lr(step):
        return learning_rate(step, peak=2.0, warmup_steps=10, num_steps=110)

    assert lr(0) == pytest.approx(0.2)
    assert lr(9) == lr(10) == 2.0
    assert lr(60) == pytest.approx(1.0)
    assert lr(110) == 0.0
    assert learning_rate(0, peak=1.0, warmup_steps=0, num_steps=1) == 1.0
