"""Rows of an image and its caption, against rows that were embedded apart and fused in float64."""

import json

import numpy as np
import pytest

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.pipelines.verify import verify
from tests.conftest import call_mlcd, write_digits

WORDS = ["a photo of a cat", "two dogs", "an old man in the sky", "the red dog by the cat"]


def rows_by_key(path):
    embeddings = EmbeddingsArtifact.open(path)
    rows = np.concatenate([embeddings.read(block) for block in embeddings.plan(64)])
    return dict(zip(embeddings.keys, rows.astype(np.float64), strict=True))


@pytest.fixture(scope="module")
def place(tmp_path_factory, two_tower_model):
    """Images, their captions, and the rows of each alone; one caption is empty, one is missing, and
    one has no image.
    """
    folder = tmp_path_factory.mktemp("fuse")
    images = write_digits(folder / "images", 12)
    keys = sorted(path.relative_to(images).as_posix() for path in images.rglob("*.png"))
    texts = [WORDS[number % 4] for number in range(12)]
    texts[3] = ""
    lines = [{"id": key, "text": text} for key, text in zip(keys, texts, strict=True)]
    lines[5]["id"] = "absent.png"
    (folder / "captions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = ("--model", two_tower_model)
    for command in (
        ("embed", images, folder / "rows", *model),
        ("embed", folder / "captions.jsonl", folder / "texts", "--texts", *model),
    ):
        assert (done := call_mlcd(*command)).returncode == 0, done.stderr
    return folder, keys, model


def fuse(place, out, *options):
    folder, _, model = place
    captions = ("--captions", folder / "captions.jsonl")
    return call_mlcd("embed", folder / "images", out, *model, *captions, *options)


@pytest.mark.parametrize(("mode", "weight"), [("mean", 0.5), ("mean", 0.25), ("concat", 0.7)])
def test_rows_are_those_of_the_equation(place, tmp_path, mode, weight):
    folder, keys, _ = place
    done = fuse(place, tmp_path / "fused", "--fuse", mode, "--image-weight", weight)
    assert done.returncode == 0, done.stderr
    images, texts = rows_by_key(folder / "rows"), rows_by_key(folder / "texts")
    fused = rows_by_key(tmp_path / "fused")
    assert list(fused) == [key for number, key in enumerate(keys) if number not in (3, 5)]
    for key, row in fused.items():
        if mode == "mean":
            expected = weight * images[key] + (1 - weight) * texts[key]
            expected /= np.linalg.norm(expected)
        else:
            expected = np.hstack([weight**0.5 * images[key], (1 - weight) ** 0.5 * texts[key]])
        np.testing.assert_allclose(row, expected, atol=2e-6)
    artifact = EmbeddingsArtifact.open(tmp_path / "fused").artifact
    assert (artifact.config["fuse"], artifact.config["image_weight"]) == (mode, weight)
    assert artifact.summary["dimension"] == len(row)
    errors = [*map(json.loads, (tmp_path / "fused" / "errors.jsonl").read_text().splitlines())]
    assert {error["key"]: error["reason"] for error in errors} == {
        keys[3]: "empty",
        keys[5]: "no-caption",
    }
    kinds = {finding.kind: finding.checked for finding in verify(tmp_path / "fused")}
    assert kinds == {"embeddings": True, "images": True, "captions": True}


def test_fused_rows_are_a_space_of_their_own(place, tmp_path):
    folder, _, model = place
    assert fuse(place, tmp_path / "fused", "--fuse", "mean").returncode == 0
    fingerprints = {
        EmbeddingsArtifact.open(path).fingerprint for path in (tmp_path / "fused", folder / "rows")
    }
    assert fuse(place, tmp_path / "other", "--fuse", "mean", "--image-weight", 0.4).returncode == 0
    fingerprints.add(EmbeddingsArtifact.open(tmp_path / "other").fingerprint)
    assert len(fingerprints) == 3
    centers = tmp_path / "centers"
    assert call_mlcd("cluster", tmp_path / "fused", centers, "--clusters", 3).returncode == 0
    assert (
        call_mlcd("label", tmp_path / "fused", tmp_path / "l", "--centers", centers).returncode == 0
    )
    refused = call_mlcd("label", folder / "rows", tmp_path / "m", "--centers", centers)
    assert (refused.returncode, "must be of the same model" in refused.stderr) == (2, True)
    again = call_mlcd("embed", folder / "images", tmp_path / "fused", *model, "--append")
    assert again.returncode == 2


def test_options_that_do_not_go_together_are_refused(place, tmp_path):
    folder, _, model = place
    alone = call_mlcd("embed", folder / "images", tmp_path / "out", *model, "--fuse", "mean")
    assert (alone.returncode, "must be given together" in alone.stderr) == (2, True)
    for options in (("--append",), ("--texts",)):
        refused = fuse(place, tmp_path / "out", "--fuse", "mean", *options)
        assert (refused.returncode, "cannot be combined" in refused.stderr) == (2, True)
    (tmp_path / "others.txt").write_text("a dog\n")
    table = ("--captions", tmp_path / "others.txt", "--fuse", "mean")
    none = call_mlcd("embed", folder / "images", tmp_path / "out", *model, *table)
    assert (none.returncode, "no image of" in none.stderr) == (2, True)
    assert not (tmp_path / "out").exists()
