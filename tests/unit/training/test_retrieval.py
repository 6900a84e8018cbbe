"""Retrieval by several captions: the definition, written out, and numbers with their protocol."""

import json
import shutil

import numpy as np
import pytest

from mlcd.types import unit_rows
from tests.conftest import call_mlcd
from training.evaluation.texts.retrieval import retrieval_figures, retrieval_ranks


def evaluated(*arguments):
    result = call_mlcd("evaluate", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    (record,) = json.loads(result.stdout.splitlines()[-1])["results"]
    return record


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


def test_what_clip_benchmark_counts_is_counted():
    """Its formula without ties: the top K of each row, and any positive among them."""
    generator = np.random.default_rng(1)
    image_of = np.repeat(np.arange(30), 5)
    images, captions = (unit_rows(generator.standard_normal((n, 6))) for n in (30, 150))
    scores = captions @ images.T
    positive = image_of[:, None] == np.arange(30)
    found = retrieval_figures(retrieval_ranks(images, captions, image_of), image_of).metrics
    for k in (1, 5, 10):
        for name, matrix, right in (
            ("text_to_image", scores, positive),
            ("image_to_text", scores.T, positive.T),
        ):
            top = np.argsort(-matrix, axis=1)[:, :k]
            recall = np.take_along_axis(right, top, axis=1).any(axis=1).mean()
            assert found[f"{name}_r@{k}"] == pytest.approx(recall)


def test_equal_images_do_not_help_each_other():
    same = unit_rows(np.ones((20, 4)))
    found = retrieval_figures(retrieval_ranks(same, same, np.arange(20)), np.arange(20)).metrics
    assert set(found.values()) == {0.0}


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
    told = call_mlcd("evaluate", *command, images)
    assert told.returncode == 2
    assert "is not a split of Karpathy's" in told.stderr


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
    assert "'gone.png' is the key of no image of" in told.stderr
    assert "(2 of 14 keys)" in told.stderr
    allowed = evaluated(*command, "--allow-unmatched")
    assert allowed["metrics"] == record["metrics"]
    assert allowed["protocol"]["unmatched"] == 2
    shutil.copy(table, images / "captions.csv")  # the same beside the images
    assert "'gone.png' is the key" in call_mlcd("evaluate", *command[:4]).stderr
    table.write_text("path,caption\n" + "".join(row.replace(",", ',"', 1) for row in rows))
    told = call_mlcd("evaluate", *command)
    assert told.returncode == 2
    assert "captions.csv, line 2: text follows the closing quote" in told.stderr


def test_images_without_captions_are_refused(two_tower_model, digits, tmp_path):
    told = call_mlcd("evaluate", "retrieval", two_tower_model, "--test", digits / "0")
    assert told.returncode == 2
    assert "no image" in told.stderr
    assert "--captions" in told.stderr
    table = tmp_path / "captions.csv"
    table.write_text("path,caption\nelsewhere/a.png,a cat\n")
    command = ("evaluate", "retrieval", two_tower_model, "--test", digits / "0")
    assert "is the key of no image of" in call_mlcd(*command, "--captions", table).stderr
