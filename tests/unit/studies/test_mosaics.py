"""The mosaics tier: its pictures, its covariates by hand, and runs that are repeated."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from mlcd.types import unit_rows
from studies.losses.frozen.features import Features
from studies.losses.instrument.asked import Asked, AskedTags
from studies.losses.mosaics.arms import MOSAIC_ARMS, MOSAIC_SEEDS, MosaicRun, all_mosaic_runs
from studies.losses.mosaics.run import covariates, perform_mosaic
from studies.losses.mosaics.tiles import (
    OBJECTS,
    PRETRAINING,
    UNSEEN,
    Mosaics,
    MosaicTeacher,
    compose,
    picture,
)


def test_every_run_has_one_name_and_every_arm_all_seeds_and_objects():
    runs = list(all_mosaic_runs())
    assert len({run.name for run in runs}) == len(runs)
    for arm in MOSAIC_ARMS.values():
        for objects in OBJECTS:
            found = [run for run in runs if (run.arm, run.objects) == (arm, objects)]
            assert {run.seed for run in found if run.teacher == "mobilenet"} == set(MOSAIC_SEEDS)


@pytest.mark.parametrize("objects", OBJECTS)
def test_the_objects_of_a_picture_have_different_classes(objects):
    classes = np.repeat(np.arange(6), 20)
    chosen = compose(classes, objects, 300)
    assert chosen.shape == (300, objects)
    assert all(len(set(row)) == objects for row in classes[chosen].tolist())
    assert (chosen == compose(classes, objects, 300)).all()
    assert (np.bincount(chosen[:, 0], minlength=120) >= 2).all()


def test_every_object_has_as_many_tiles_of_the_same_size():
    photographs = np.stack([np.full((3, 8, 8), 50 * each, np.uint8) for each in range(4)])
    for objects in OBJECTS:
        whole = np.asarray(picture(photographs[:objects]))
        assert whole.shape == (16, 16, 3)
        values, counts = np.unique(whole[::8, ::8, 0], return_counts=True)
        assert values.tolist() == [50 * each for each in range(objects)]
        assert (counts == 4 // objects).all()
    photographs[0, :, 0, 0] = 9, 8, 7
    assert np.asarray(picture(photographs))[0, 0].tolist() == [9, 8, 7]


def test_covariates_by_hand():
    # clusters 0, 1 hold class 0, cluster 2 class 1, cluster 3 nothing
    stored = np.array([[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 0, 3], [2, 3, 0]])
    tags = np.array([[1, 0], [1, 0], [1, 0], [0, 1], [1, 1]], dtype=bool)
    found = covariates(stored, tags, clusters=4, labels=2)
    assert found["purity"] == 1.0
    assert found["label_purity"] == (2 + 1 + 2 + 1 + 1) / 10
    # negatives of the rows: {2, 3}, {1, 3}, {2, 3}, {1, 3}, {0, 1}
    assert found["conflict"] == pytest.approx((0 + 1 + 0 + 0 + 2) / 5 / 2)


@pytest.fixture
def data(tmp_path):
    """Two sets of a few classes, each of its own color, in folders."""
    rng = np.random.default_rng(0)
    for name, num in ((PRETRAINING, 15), (UNSEEN, 6)):
        for number in range(5):
            folder = tmp_path / "data" / name / f"class{number}"
            folder.mkdir(parents=True)
            color = rng.integers(0, 255, 3)
            for each in range(num):
                noise = rng.integers(-40, 40, (64, 64, 3))
                pixels = np.clip(color + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{each}.png")
    return tmp_path / "data"


def test_features_are_made_once_of_trained_photographs_only(data, tmp_path, monkeypatch):
    monkeypatch.setattr("studies.losses.mosaics.tiles.SHARDS", PRETRAINING)
    monkeypatch.setattr("studies.losses.mosaics.tiles._NUM_TRAINING", 40)
    monkeypatch.setattr("studies.losses.mosaics.tiles._NUM_ASKED", 12)
    mosaics = Mosaics(Features(data, tmp_path / "frozen"), tmp_path / "state")
    assert len(mosaics.tiles(PRETRAINING).classes) == 40
    assert len(mosaics.tiles(UNSEEN).classes) == 30
    teacher = mosaics.open("hog", 2)
    assert teacher.training.shape[0] == len(teacher.tags) == 40
    assert (teacher.tags.sum(axis=1) == 2).all()
    assert [len(each.rows) for each in teacher.asked] == [12, 12, 12]
    path = tmp_path / "state/features/hog" / f"{PRETRAINING}-2.npy"
    before = path.stat().st_mtime_ns
    again = mosaics.open("hog", 2)
    assert path.stat().st_mtime_ns == before
    assert (again.training == teacher.training).all()


def test_a_run_is_repeated_to_the_last_bit(tmp_path):
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 6, (200, 2))
    directions = rng.standard_normal((6, 24))
    rows = directions[classes].sum(axis=1) + rng.standard_normal((200, 24))
    tags = np.zeros((200, 6), bool)
    tags[np.arange(200)[:, None], classes] = True
    rows = unit_rows(rows.astype(np.float32))
    teacher = MosaicTeacher("toy", rows, tags, (AskedTags("tiles_2", rows[:50], tags[:50]),))
    singles = (Asked("single", rows[:40], classes[:40, 0]),)
    arm = replace(MOSAIC_ARMS["MLCD"], clusters=12, labels=3, steps=30)
    run = MosaicRun("toy", 2, arm, 1)
    tagged = [AskedTags("coco", rows[:60], tags[:60])]
    one, other = (perform_mosaic(run, teacher, singles, tagged, tmp_path / name) for name in "ab")
    assert (one.right == other.right).all()
    assert len(one.right) == 40 + tags[:50].sum()
    for name, value in one.numbers.items():
        assert name.endswith("_s") or value == other.numbers[name]
    assert {"knn_single", "tiles_2", "map_coco", "purity", "conflict"} < set(one.numbers)
