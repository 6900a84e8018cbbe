"""The variants of ImageNet: their class maps, what is refused by name, and a run of all."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from mlcd.errors import InvalidInput, NotFound
from mlcd.training.evaluation.robustness import classify_variants, variants
from mlcd.training.evaluation.robustness.classify_variants import choose_classes
from mlcd.training.evaluation.robustness.variants import VARIANTS, class_map
from mlcd.training.evaluation.texts.class_names import names_of, table_of_set
from mlcd.training.evaluation.texts.imagenet import imagenet_names, variant_ids
from mlcd.training.evaluation.texts.tested import open_test_images
from tests.conftest import refuse, succeed

V2, A, R, SKETCH, OBJECTNET = VARIANTS
NAMES = {"n00000001": "cat", "n00000002": "dog", "n00000003": "cow"}


@pytest.fixture
def small(monkeypatch):
    """An ImageNet of three classes, two of them in -A and in -R, with one image a class."""

    def ids(name):
        return list(NAMES)[:2] if name in ("imagenet_a", "imagenet_r") else list(NAMES)

    monkeypatch.setattr(variants, "imagenet_names", lambda: dict(NAMES))
    monkeypatch.setattr(variants, "variant_ids", ids)
    images = {"imagenet_a": 2, "imagenet_r": 2, "objectnet": 2}
    few = tuple(replace(each, images=images.get(each.name, 3)) for each in VARIANTS)
    monkeypatch.setattr(classify_variants, "VARIANTS", few)
    return few


def write_image(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(value).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_variants(data):
    folders = {
        "imagenet_v2": ["0", "1", "2"],
        "imagenet_a": list(NAMES)[:2],
        "imagenet_r": list(NAMES)[:2],
        "imagenet_sketch": list(NAMES),
        "objectnet/images": ["alarm_clock", "tie", "spoon"],
    }
    for name, inside in folders.items():
        for number, folder in enumerate(inside):
            write_image(data / name / folder / "a.png", number)
    write_mappings(data, {"Alarm clock": "analog clock", "Tie": "bow tie; Windsor tie"})


def write_mappings(data, overlap):
    mappings = data / "objectnet" / "mappings"
    mappings.mkdir(parents=True, exist_ok=True)
    labels = {"alarm_clock": "Alarm clock", "tie": "Tie", "spoon": "Spoon"}
    (mappings / "folder_to_objectnet_label.json").write_text(json.dumps(labels))
    (mappings / "objectnet_to_imagenet_1k.json").write_text(json.dumps(overlap))


def test_the_ids_are_wordnets_in_order_and_the_names_are_clips():
    names = imagenet_names()
    ids = list(names)
    assert (len(ids), ids, ids[0], names[ids[0]]) == (1000, sorted(ids), "n01440764", "tench")
    assert names["n02099601"] == "Golden Retriever"
    assert list(names.values())[-1] == "toilet paper"
    twice = {name for name in names.values() if list(names.values()).count(name) > 1}
    assert twice == {"missile", "sunglasses"}
    for variant in (A, R):
        chosen = variant_ids(variant.name)
        assert len(chosen) == variant.classes == 200
        assert chosen == [each for each in ids if each in set(chosen)]
    assert len(set(variant_ids(A.name)) & set(variant_ids(R.name))) < 200
    assert variant_ids(SKETCH.name) == ids
    table = table_of_set("imagenet")
    assert names_of(ids, table) == [(name,) for name in names.values()]


def test_folders_of_numbers_are_classes_by_number_and_not_by_spelling(tmp_path):
    ids = list(imagenet_names())
    found = class_map(V2, tmp_path)
    assert [found.class_of[folder] for folder in ("0", "2", "10")] == [ids[0], ids[2], ids[10]]
    assert set(class_map(A, tmp_path).class_of) == set(variant_ids("imagenet_a"))


def test_the_map_of_objectnet_is_that_of_the_data_set(tmp_path):
    with pytest.raises(NotFound, match="folder_to_objectnet_label"):
        class_map(OBJECTNET, tmp_path / "objectnet")
    write_mappings(tmp_path, {"Tie": "bow tie; Windsor tie"})
    found = class_map(OBJECTNET, tmp_path / "objectnet")
    assert (found.names, found.partial) == ({"tie": "tie"}, True)
    write_mappings(tmp_path, {"Teapot": "teapot"})
    with pytest.raises(InvalidInput, match="names 'Teapot', which"):
        class_map(OBJECTNET, tmp_path / "objectnet")
    mapping = tmp_path / "objectnet" / "mappings" / "objectnet_to_imagenet_1k.json"
    for text, refusal in (("[", "is not JSON"), ('{"Tie": 1}', "must be a JSON object")):
        mapping.write_text(text)
        with pytest.raises(InvalidInput, match=refusal):
            class_map(OBJECTNET, tmp_path / "objectnet")


def test_a_variant_that_is_not_whole_is_refused_by_name(small, tmp_path):
    write_variants(tmp_path)
    variant = small[1]
    folder = tmp_path / variant.name

    def check():
        return choose_classes(open_test_images(str(folder)), class_map(variant, folder), variant)

    assert check().all_classes == list(NAMES)[:2]
    write_image(folder / "n00000001" / "b.png", 9)
    with pytest.raises(InvalidInput, match="ImageNet-A must have 2 images, got 3"):
        check()
    (folder / "n00000001" / "b.png").rename(folder / "n00000002" / "b.png")
    (folder / "n00000001" / "a.png").unlink()
    with pytest.raises(InvalidInput, match="of all 2 classes, 1 have none, such as n00000001"):
        check()
    write_image(folder / "n00000003" / "a.png", 9)
    with pytest.raises(InvalidInput, match="n00000003 is not a class of ImageNet-A"):
        check()


def test_each_variant_is_classified_among_its_own_classes(small, two_tower_model, tmp_path):
    write_variants(tmp_path / "data")
    (tmp_path / "data" / "imagenet_r" / "n00000001" / "a.png").unlink()
    out = tmp_path / "out"
    command = ("evaluate", "robustness", two_tower_model, "--data", tmp_path / "data")
    told = succeed(*command, "--out", out)
    assert "imagenet_r: not evaluated: ImageNet-R must have images of all" in told.stdout
    assert told.stdout.rstrip().endswith("missing: none")
    found = {
        path.name: json.loads((path / "results.json").read_text())[0] for path in out.iterdir()
    }
    classes = {name: record["protocol"]["classes"] for name, record in found.items()}
    assert classes == {"imagenet_v2": 3, "imagenet_a": 2, "imagenet_sketch": 3, "objectnet": 2}
    assert found["objectnet"]["metrics"]["test_images"] == 2  # the spoon is left out
    assert found["objectnet"]["protocol"]["prompts"] == "the bare name"
    for record in found.values():
        assert {"split", "map_sha256", "features"} <= record["protocol"].keys()
        assert record["intervals"].keys() == {"zero_shot_top1", "zero_shot_mean_per_class"}
        assert record["seen"]["images"] == 0
    made = {path: path.stat().st_mtime_ns for path in out.rglob("*.json")}
    succeed(*command, "--out", out)
    assert made == {path: path.stat().st_mtime_ns for path in out.rglob("*.json")}
    refuse(
        "evaluate robustness",
        two_tower_model,
        "--data",
        tmp_path,
        contains="must contain one of imagenet_v2, imagenet_a",
    )
