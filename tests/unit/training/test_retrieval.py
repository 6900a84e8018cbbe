"""Retrieval by several captions: the definition, written out, and numbers with their protocol."""

import json
import shutil

import numpy as np
import pytest

from mlcd.training.evaluation.texts.retrieval import retrieval_figures, retrieval_ranks
from mlcd.types import unit_rows
from tests.conftest import call_mlcd, refuse
from tests.unit.training.running import evaluated


def brute_force(images, captions, image_of, cutoff):
    """Both shares from the whole matrix, one image and one caption at a time; ties are wrong."""
    scores = (images.astype(np.float64) @ captions.T.astype(np.float64)).astype(np.float32)
    found_images = []
    for image, row in enumerate(scores):
        own = row[image_of == image].max()
        found_images.append((row[image_of != image] >= own).sum() < cutoff)
    found_captions = []
    for caption, column in enumerate(scores.T):
        others = np.delete(column, image_of[caption])
        found_captions.append((others >= column[image_of[caption]]).sum() < cutoff)
    return np.mean(found_images), np.mean(found_captions)


@pytest.mark.parametrize("cells", [1, 100, 1 << 20])
def test_ranks_are_those_of_the_whole_matrix(cells):
    generator = np.random.default_rng(0)
    counts = generator.integers(1, 6, 40)
    image_of = np.repeat(np.arange(40), counts)
    centers = generator.standard_normal((40, 8))
    images = unit_rows(centers + generator.standard_normal((40, 8)))
    captions = unit_rows(centers[image_of] + generator.standard_normal((len(image_of), 8)))
    images[7], captions[20] = images[3], captions[19]  # equal rows
    ranks = retrieval_ranks(images, captions, image_of, cells=cells)
    found = retrieval_figures(ranks, image_of)
    for cutoff in (1, 5, 10):
        images_found, captions_found = brute_force(images, captions, image_of, cutoff)
        assert found.metrics[f"image_to_text_r@{cutoff}"] == pytest.approx(images_found)
        assert found.metrics[f"text_to_image_r@{cutoff}"] == pytest.approx(captions_found)
        for name in (f"image_to_text_r@{cutoff}", f"text_to_image_r@{cutoff}"):
            low, high = found.intervals[name]
            assert low <= found.metrics[name] <= high


def test_the_command_takes_captions_beside_images_or_of_a_table(two_tower_model, digits, tmp_path):
    images = shutil.copytree(digits / "0", tmp_path / "images")
    words = ("a photo of the cat", "two dogs", "old man by the sky", "red dog", "a woman")
    files = sorted(images.glob("*.png"))
    rows = [
        {"path": file.name, "captions": [words[n % 5], f"{words[(n + 2) % 5]} on the sky"]}
        for n, file in enumerate(files[:-1])
    ]
    table = tmp_path / "captions.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    command = ("retrieval", two_tower_model, "--test", images)
    record = evaluated(*command, "--captions", table, "--out", out)
    assert record["metrics"]["test_images"] == len(files) - 1  # one has none
    assert record["protocol"]["captions"] == 2 * (len(files) - 1)
    assert record["protocol"]["captions_per_image"] == "2 to 2"
    assert len(record["protocol"]["split"]) == 64
    assert evaluated(*command, "--captions", table, "--out", out) == record
    one = evaluated(*command, "--captions", table, "--captions-per-image", 1)
    assert one["protocol"]["captions"] == len(files) - 1
    shutil.copy(table, images / "captions.jsonl")
    assert evaluated(*command)["metrics"] == record["metrics"]
    call_mlcd("embed", images, tmp_path / "rows", "--model", two_tower_model)
    stored = ("retrieval", two_tower_model, "--test", tmp_path / "rows")
    assert evaluated(*stored, "--captions", table)["metrics"] == record["metrics"]
    assert "with --captions" in call_mlcd("evaluate", *stored).stderr


def test_of_a_split_of_karpathys_the_test_part_is_taken(two_tower_model, digits, tmp_path):
    """COCO's images lie in the folder that the split names, or that folder is given itself."""
    images = shutil.copytree(digits / "0", tmp_path / "coco" / "val2014")
    split, rows = tmp_path / "dataset_coco.json", []
    for number, file in enumerate(sorted(images.glob("*.png"))):
        sentences = [{"raw": text} for text in ("a cat", f"dog {number % 3}")]
        part = ("train", "restval", "val", "test")[number % 4]
        row = {"filename": file.name, "filepath": "val2014", "split": part, "sentences": sentences}
        rows.append(row)
    split.write_text(json.dumps({"dataset": "coco", "images": rows}))
    command = ("retrieval", two_tower_model, "--captions", split, "--test")
    records = [evaluated(*command, place) for place in (images.parent, images)]
    assert records[0]["metrics"] == records[1]["metrics"]
    for record in records:
        assert record["metrics"]["test_images"] == len(rows) // 4
        assert record["protocol"]["captions"] == 2 * (len(rows) // 4)
    split.write_text(json.dumps({"annotations": []}))
    refuse("evaluate", *command, images, contains="is not a split of Karpathy")


def test_captions_of_no_image_are_refused_unless_asked_for(two_tower_model, digits, tmp_path):
    images = shutil.copytree(digits / "0", tmp_path / "images")
    names = sorted(file.name for file in images.glob("*.png"))[:12]
    table = tmp_path / "captions.csv"
    command = ("retrieval", two_tower_model, "--test", images, "--captions", table)
    rows = [f"{name},the cat {number}\n" for number, name in enumerate(names)]
    table.write_text("path,caption\n" + rows[0] + "".join(f"./{row}" for row in rows[1:]))
    record = evaluated(*command)
    assert record["metrics"]["test_images"] == 12
    assert record["protocol"]["unmatched"] == 0
    assert record["protocol"]["without_caption"] == len(list(images.glob("*.png"))) - 12
    table.write_text("path,caption\n" + "".join(rows) + "gone.png,red\ngone.png,dog\nb.png,man\n")
    told = call_mlcd("evaluate", *command)
    assert told.returncode == 2
    assert "has the key 'gone.png'" in told.stderr
    assert "(2 of 14 keys)" in told.stderr
    allowed = evaluated(*command, "--allow-unmatched")
    assert allowed["metrics"] == record["metrics"]
    assert allowed["protocol"]["unmatched"] == 2
    shutil.copy(table, images / "captions.csv")  # the same beside the images
    assert "has the key 'gone.png'" in call_mlcd("evaluate", *command[:4]).stderr
    table.write_text("path,caption\n" + "".join(row.replace(",", ',"', 1) for row in rows))
    refuse("evaluate", *command, contains="captions.csv, line 2: text follows the closing quote")


def test_images_without_captions_are_refused(two_tower_model, digits, tmp_path):
    told = call_mlcd("evaluate", "retrieval", two_tower_model, "--test", digits / "0")
    assert told.returncode == 2
    assert "no image" in told.stderr
    assert "--captions" in told.stderr
    table = tmp_path / "captions.csv"
    table.write_text("path,caption\nelsewhere/a.png,a cat\n")
    command = ("evaluate", "retrieval", two_tower_model, "--test", digits / "0")
    assert "has the key" in call_mlcd(*command, "--captions", table).stderr
