"""The suite: definitions of CLIP's sets, damage refused by name, and a run that can be resumed."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from mlcd.errors import InvalidInput
from mlcd.images.sources import open_source
from tests.conftest import call_mlcd
from training.evaluation.label_tables import read_labels
from training.evaluation.suite import definitions, layout
from training.evaluation.suite.definitions import AVERAGED, SETS
from training.evaluation.suite.layout import check_set, find_sets
from training.evaluation.suite.prompts import set_prompts

TINY = (2, 4, 2)  # classes, images to train on, images to test on


@pytest.fixture
def small_sets(monkeypatch):
    """The sets with few images and classes, but with their own metrics, folds and labels."""
    small = {
        name: definitions.DataSet(
            name, one.title, *TINY, metric=one.metric, folds=one.folds, trap=one.trap
        )
        for name, one in SETS.items()
    }
    monkeypatch.setattr(layout, "SETS", small)
    return small


def write_image(path, value=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((8, 8, 3), value % 256, dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_set(data, name):
    """Writes a tiny set in the layout of its definition: two classes, four and two images."""
    files = []
    for part, num in (("train", 4), ("test", 2)):
        for number in range(num):
            folder = part if name == "voc2007" else f"{part}/class_{number % 2}"
            files.append(f"{folder}/{number}.png")
            write_image(data / name / files[-1], len(files))
    if name == "voc2007":
        lines = [{"path": key, "labels": [["cat"], ["dog"]][n % 2]} for n, key in enumerate(files)]
        (data / name / "labels.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    if name == "stl10":
        (data / "splits").mkdir(exist_ok=True)
        split = {"folds": [files[:4]] * 10, "test": files[4:]}
        (data / "splits" / f"{name}.json").write_text(json.dumps(split))
    return files


def check(found):
    labels = None if found.labels is None else read_labels(found.labels)
    check_set(found, open_source(str(found.images)), labels)


def test_there_are_26_sets_and_imagenet():
    assert len(AVERAGED) == 26
    assert set(AVERAGED) == set(set_prompts())
    special = {name: one.metric for name, one in SETS.items() if one.metric != "accuracy"}
    assert special == {
        "fgvc_aircraft": "mean-per-class",
        "oxford_pets": "mean-per-class",
        "caltech101": "mean-per-class",
        "flowers102": "mean-per-class",
        "voc2007": "map-11",
        "kinetics700": "mean-top1-top5",
        "hateful_memes": "roc-auc",
    }
    assert {name for name, one in SETS.items() if one.folds > 1} == {"stl10"}
    for name in AVERAGED:
        assert len(set_prompts()[name].classes) == SETS[name].classes


def test_each_of_the_layouts_is_accepted(small_sets, tmp_path):
    for name in small_sets:
        write_set(tmp_path, name)
    found = find_sets(tmp_path)
    assert [one.name for one in found] == list(SETS)
    for one in found:
        check(one)


@pytest.mark.parametrize("name", ["food101", "stl10", "voc2007"])
def test_each_kind_of_damage_is_refused_by_name(name, small_sets, tmp_path):
    files = write_set(tmp_path, name)
    (tmp_path / name / files[-1]).unlink()
    (one,) = find_sets(tmp_path)
    if name == "voc2007":
        check(one)  # its table still has the image; embedding tells of the file
    else:
        refusals = {"food101": "test of food101 has 1", "stl10": "test of stl10 names test/class_1"}
        with pytest.raises(InvalidInput, match=refusals[name]):
            check(one)
    shutil.rmtree(tmp_path / name)
    write_set(tmp_path, name)
    write_image(tmp_path / name / "train" / "class_2" / "9.png")
    if name == "food101":
        with pytest.raises(InvalidInput, match="train of food101 has 3 classes, not 2"):
            check(find_sets(tmp_path)[0])
    if name == "stl10":
        (tmp_path / "splits" / "stl10.json").unlink()
        with pytest.raises(InvalidInput, match="10 official folds"):
            check(find_sets(tmp_path)[0])
    if name == "voc2007":
        (tmp_path / name / "labels.jsonl").unlink()
        with pytest.raises(InvalidInput, match=r"has no labels\.jsonl"):
            check(find_sets(tmp_path)[0])


def test_a_set_without_parts_or_with_others_is_refused(small_sets, tmp_path):
    write_set(tmp_path, "mnist")
    shutil.move(tmp_path / "mnist" / "test", tmp_path / "mnist" / "other")
    with pytest.raises(InvalidInput, match="has no folders train and test"):
        check(find_sets(tmp_path)[0])
    (tmp_path / "splits").mkdir()
    split = {"train": [f"train/class_{n % 2}/{n}.png" for n in range(4)], "test": ["a.png"]}
    (tmp_path / "splits" / "mnist.json").write_text(json.dumps(split))
    with pytest.raises(InvalidInput, match=r"test of mnist names a\.png, which is not there"):
        check(find_sets(tmp_path)[0])


def test_a_run_measures_what_is_there_and_says_what_is_not(two_tower_model, digits, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    for digit in "01":
        shutil.copytree(digits / digit, data / "mine" / digit)
    write_set(data, "food101")
    (data / "splits").mkdir()
    (data / "splits" / "mine.json").write_text('{"names": {"0": "cat", "1": ["dog", "two dogs"]}}')
    command = ("evaluate", "suite", "--data", data, "--model", two_tower_model, "--out", out)
    told = call_mlcd(*command)
    assert told.returncode == 0, told.stderr
    report = json.loads((out / "report.json").read_text())
    food, mine = report["sets"]
    assert food["probe"] is None
    assert "not 101" in food["reasons"]["linear-probe"]
    assert mine["reasons"] == {}
    assert 0 <= mine["probe"]["metrics"]["linear_probe_accuracy"] <= 1
    assert mine["zero_shot"]["protocol"]["names"] == "of a table"
    assert mine["seen"]["of"] == len(list((data / "mine").rglob("*.png")))
    assert len(report["missing"]) == 26
    assert report["means"]["probe"] == {"sets": 0, "mean": None}
    page = (out / "report.md").read_text()
    assert "| mine | accuracy |" in page
    assert "MLCD ViT-L/14 (LAION-400M) | 26 | 84.6 | 84.6 |" in page
    assert page.strip() == told.stdout.strip()
    # As after kill -9 between two sets: what is finished is not made again.
    made = (out / "features" / "mine" / "manifest.json").stat().st_mtime_ns
    shutil.rmtree(out / "zero-shot")
    (out / "report.json").unlink()
    assert call_mlcd(*command).stdout == told.stdout
    assert json.loads((out / "report.json").read_text()) == report
    assert (out / "features" / "mine" / "manifest.json").stat().st_mtime_ns == made
    refused = call_mlcd(*command, "--set", "mnist")
    assert refused.returncode == 2
    assert "has no data set mnist" in refused.stderr
