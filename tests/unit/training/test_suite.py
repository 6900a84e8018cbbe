"""The suite: definitions of CLIP's sets, damage refused by name, and a run that can be resumed."""

import hashlib
import io
import json
import shutil
import time
from xml.etree import ElementTree as ET

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mlcd.errors import InvalidInput
from mlcd.images.sources import open_source
from mlcd.training.evaluation.label_tables import read_labels
from mlcd.training.evaluation.suite import definitions, set_files
from mlcd.training.evaluation.suite.definitions import AVERAGED, SETS
from mlcd.training.evaluation.suite.radar import radar
from mlcd.training.evaluation.suite.set_files import check_hashes, check_set, find_sets
from mlcd.training.evaluation.texts.clip_prompts import set_prompts
from tests.conftest import refuse, start_mlcd, succeed
from tests.saved_datasets import write_saved_parts

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
    monkeypatch.setattr(set_files, "SETS", small)
    return small


def png(value):
    buffer = io.BytesIO()
    Image.new("L", (8, 8), value).save(buffer, "PNG")
    return buffer.getvalue()


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


def test_layouts_of_others_are_accepted(small_sets, tmp_path):
    images = [png(value) for value in range(6)]
    parts = {"train": (images[:4], [0, 1, 0, 1]), "test": (images[4:], [0, 1])}
    write_saved_parts(tmp_path / "food101", parts, ["cat", "dog"])
    for part, (data, numbers) in parts.items():
        (tmp_path / "mnist" / "data").mkdir(parents=True, exist_ok=True)
        table = pa.table({"image": data, "label": numbers})
        pq.write_table(table, tmp_path / "mnist" / "data" / f"{part}-00000-of-00001.parquet")
    write_set(tmp_path, "dtd")
    shutil.make_archive(str(tmp_path / "dtd"), "zip", tmp_path / "dtd")
    shutil.rmtree(tmp_path / "dtd")
    whole = {"cat": images[:3], "dog": images[3:]}
    keys = [f"{name}-{number}" for name in whole for number in range(3)]
    names = [name for name in whole for _ in range(3)]
    table = pa.table({"key": keys, "image": images, "label": names})
    pq.write_table(table, tmp_path / "eurosat.parquet")
    (tmp_path / "splits").mkdir()
    split = {"train": [keys[at] for at in (0, 1, 3, 4)], "test": [keys[2], keys[5]]}
    (tmp_path / "splits" / "eurosat.json").write_text(json.dumps(split))
    found = find_sets(tmp_path)
    assert {one.name for one in found} == {"food101", "mnist", "dtd", "eurosat"}
    for one in found:
        check(one)


def remove_class(data, name):
    for folder in ("train", "test"):
        shutil.rmtree(data / name / folder / "class_1")


def remove_image(data, name):
    (data / name / "test" / "class_1" / "1.png").unlink()


def add_class(data, name):
    write_image(data / name / "train" / "class_2" / "9.png")


def swap_parts(data, name):
    (data / name / "train").rename(data / name / "other")
    (data / name / "test").rename(data / name / "train")
    (data / name / "other").rename(data / name / "test")


def rename_part(data, name):
    (data / name / "test").rename(data / name / "other")


@pytest.mark.parametrize(
    ("damage", "refusal"),
    [
        (remove_class, "of {} must have 2 classes, got 1"),
        (remove_image, "test of {} must have 2 classes, got 1"),
        (add_class, "train of {} must have 2 classes, got 3"),
        (swap_parts, "train of {} must have 4 images, got 2"),
        (rename_part, "{} requires folders train and test"),
    ],
)
def test_each_kind_of_damage_of_each_layout_is_refused_by_name(
    damage, refusal, small_sets, tmp_path
):
    plain = [name for name in small_sets if name not in ("voc2007", "stl10")]
    for name in plain:
        write_set(tmp_path, name)
        damage(tmp_path, name)
    for one in find_sets(tmp_path):
        with pytest.raises(InvalidInput, match=refusal.format(one.name)):
            check(one)


def test_damage_of_folds_and_of_several_labels_is_refused_by_name(small_sets, tmp_path):
    files = write_set(tmp_path, "stl10")
    write_set(tmp_path, "voc2007")
    (tmp_path / "stl10" / files[-1]).unlink()
    with pytest.raises(InvalidInput, match=r"test of stl10 names test/class_1/1\.png"):
        check(find_sets(tmp_path)[1])
    (tmp_path / "splits" / "stl10.json").unlink()
    with pytest.raises(InvalidInput, match="10 official folds"):
        check(find_sets(tmp_path)[1])
    table = tmp_path / "voc2007" / "labels.jsonl"
    lines = table.read_text().splitlines()
    table.write_text("\n".join(lines[:-1]))
    with pytest.raises(InvalidInput, match="test of voc2007 must have 2 images, got 1"):
        check(find_sets(tmp_path)[0])
    table.unlink()
    with pytest.raises(InvalidInput, match=r"requires labels\.jsonl"):
        check(find_sets(tmp_path)[0])


def test_images_that_differ_from_their_stated_hashes_are_refused_by_name(small_sets, tmp_path):
    files = write_set(tmp_path, "mnist")
    (tmp_path / "splits").mkdir()
    digests = {
        key: hashlib.sha256((tmp_path / "mnist" / key).read_bytes()).digest() for key in files
    }
    lines = [f"{digests[key].hex()}  ./{key}" for key in files]
    stated = tmp_path / "splits" / "mnist.sha256"
    stated.write_text("\n".join(lines))
    (found,) = find_sets(tmp_path)
    check_hashes(found, digests)
    with pytest.raises(InvalidInput, match=f"{files[0]} of mnist does not match its checksum"):
        check_hashes(found, {**digests, files[0]: digests[files[1]]})
    with pytest.raises(InvalidInput, match=f"mnist lacks a usable image {files[0]}"):
        check_hashes(found, {key: digests[key] for key in files[1:]})
    stated.write_text("nothing")
    with pytest.raises(
        InvalidInput, match=r"line 1 of .*mnist\.sha256 must be a SHA-256 and a path"
    ):
        check_hashes(found, digests)


@pytest.fixture(scope="module")
def suite_data(digits, tmp_path_factory):
    """Two data sets of two digits each, one that lacks nearly everything, and one of no images."""
    data = tmp_path_factory.mktemp("suite")
    for first in (0, 2):
        for digit in (first, first + 1):
            shutil.copytree(digits / str(digit), data / f"mine{first}" / str(digit))
    write_set(data, "food101")
    for name in ("cat", "dog"):
        (data / "torn" / name).mkdir(parents=True)
        (data / "torn" / name / "a.jpg").write_bytes(b"torn")
    (data / "splits").mkdir()
    names = {"names": {"0": "cat", "1": ["dog", "two dogs"]}}
    (data / "splits" / "mine0.json").write_text(json.dumps(names))
    key = next((data / "mine2").rglob("*.png")).relative_to(data / "mine2")
    (data / "splits" / "mine2.sha256").write_text(f"{'0' * 64}  {key}\n")
    return data


def test_a_run_measures_what_is_there_and_says_what_is_not(
    two_tower_model, suite_data, journey, tmp_path
):
    out = tmp_path / "out"
    models = ("--model", two_tower_model, "--model", journey / "model")
    command = ("evaluate", "suite", "--data", suite_data, *models, "--out", out)
    told = succeed(*command)
    report = json.loads((out / "report.json").read_text())
    both, images_only = report["models"]
    model = f"{two_tower_model.parent.name}/model"
    assert (both["model"], images_only["model"]) == (model, "demo/model")
    food, mine, changed, torn = both["sets"]
    assert "none of the 2 files in" in torn["reasons"]["linear-probe"]
    assert food["probe"] is None
    assert "must have 101 classes" in food["reasons"]["linear-probe"]
    assert "does not match its checksum in mine2.sha256" in changed["reasons"]["zero-shot"]
    assert mine["reasons"] == {}
    assert 0 <= mine["probe"]["metrics"]["linear_probe_accuracy"] <= 1
    assert mine["zero_shot"]["protocol"]["names"] == "of a table"
    assert mine["seen"]["of"] == len(list((suite_data / "mine0").rglob("*.png")))
    assert images_only["sets"][1]["reasons"] == {"zero-shot": "the model lacks a text tower"}
    assert images_only["sets"][1]["seen"]["images"] > 0
    assert len(both["missing"]) == 26
    assert both["means"]["probe"] == {"sets": 0, "mean": None}
    page = (out / "report.md").read_text()
    assert f"| mine0 | accuracy | {model} |" in page
    assert "| mine0 | accuracy | demo/model |" in page
    assert "MLCD ViT-L/14 (LAION-400M) | 26 | 84.6 | 84.6 |" in page
    assert page.strip() == told.stdout.strip()
    refuse(*command, "--set", "mnist", contains="data set mnist is missing")


def test_a_run_that_was_killed_goes_on_to_the_same_bytes(two_tower_model, suite_data, tmp_path):
    def command(out):
        places = ("--data", suite_data, "--model", two_tower_model, "--out", out)
        return ("evaluate", "suite", *places, "--set", "mine0", "--set", "mine2")

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    running = start_mlcd(*command(killed))
    made = killed / "model" / "features" / "mine0" / "manifest.json"
    while not made.is_file():
        assert running.poll() is None
        time.sleep(0.005)
    running.kill()
    running.communicate()
    assert not (killed / "report.json").exists()
    first = made.stat().st_mtime_ns
    for out in (killed, whole):
        succeed(*command(out))
    assert made.stat().st_mtime_ns == first  # it is not made again
    for name in ("report.json", "report.md"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_the_picture_has_an_axis_for_each_set_and_a_ring_for_each_model():
    drawn = radar(["a", "b & c", "d"], {"one": [0.0, 0.5, 1.0], "two": [0.25, None, 0.25]})
    root = ET.fromstring(drawn)
    polygons = [each for each in root if each.tag.endswith("polygon")]
    *grid, one, two = (each.attrib["points"].split() for each in polygons)
    assert [len(ring) for ring in grid] == [3] * 4
    assert (len(one), len(two)) == (3, 2)
    assert one[0] == "320.0,320.0"  # nothing is right: the center
    assert "b & c" in {each.text for each in root}
