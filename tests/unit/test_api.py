"""The Python interface gives what the commands give, and NumPy arrays what NumPy computes."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mlcd
from mlcd.artifacts.labels import LabelTable
from mlcd.errors import ConfigInvalid, Conflict, ImageRejected, InvalidInput, NotFound
from tests.conftest import call_mlcd, succeed

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "python.md"


@pytest.fixture(scope="module")
def photos(digits):
    return mlcd.embed(digits, model="hog")


def test_the_page_runs_as_it_is_written(digits, tmp_path, monkeypatch, capsys):
    (tmp_path / "photos").symlink_to(digits)
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    shown = capsys.readouterr().out
    assert "hog 1764 (2, 1764)" in shown
    assert "nowhere" in shown
    assert [ids[0] for ids in names["found"].ids] == names["photos"].keys[:2]


def test_embeddings_are_those_of_the_command(digits, photos, tmp_path):
    succeed("embed", digits, tmp_path / "command", "--model", "hog")
    command = mlcd.EmbeddingsArtifact.open(tmp_path / "command")
    np.testing.assert_array_equal(photos.vectors, command.load())
    assert (photos.keys, photos.class_names, photos.skipped) == (
        command.keys,
        command.class_names,
        [],
    )
    written = mlcd.embed(digits, model="hog", out=tmp_path / "call")
    np.testing.assert_array_equal(written.vectors, photos.vectors)
    assert (
        mlcd.EmbeddingsArtifact.open(tmp_path / "call").artifact.digest == command.artifact.digest
    )


def test_a_model_embeds_every_kind_of_image_alike(digits, photos):
    path = digits / "3" / "0003.png"
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    with mlcd.load_model("hog") as model:
        kinds = [path, str(path), path.read_bytes(), pixels, Image.fromarray(pixels)]
        rows = model.embed(kinds * 8)  # more than a batch
        assert model.embed([]).shape == (0, model.dimension)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(
        rows, np.tile(photos.vectors[photos.keys.index("3/0003.png")], (40, 1))
    )


def test_an_image_that_cannot_be_used_is_told_by_its_place(digits):
    with mlcd.load_model("hog") as model:
        with pytest.raises(ImageRejected, match="image 33: ") as rejected:
            model.embed([digits / "3" / "0003.png"] * 33 + [b"no image"])
        assert rejected.value.reason == "unsupported-format"
        with pytest.raises(ImageRejected, match="image 0: "):
            model.embed(["nowhere.png"])
        with pytest.raises(InvalidInput, match="series of images"):
            model.embed(digits / "3" / "0003.png")


def test_what_is_skipped_is_told(digits, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "good.png").write_bytes((digits / "3" / "0003.png").read_bytes())
    (tmp_path / "a" / "bad.png").write_bytes(b"")
    photos = mlcd.embed(tmp_path, model="hog")
    assert photos.keys == ["a/good.png"]
    assert [(each["key"], each["reason"]) for each in photos.skipped] == [("a/bad.png", "empty")]


def test_centers_of_an_array_are_those_of_its_artifact(digits, photos, tmp_path):
    mlcd.embed(digits, model="hog", out=tmp_path / "embeddings")
    for mean in (False, True):
        written = mlcd.cluster(
            tmp_path / "embeddings", 12, hold_out=0, subtract_mean=mean, names=True
        )
        centers = mlcd.cluster(photos.vectors * 3, 12, subtract_mean=mean)
        np.testing.assert_allclose(centers.vectors, written.vectors, atol=1e-6)
        np.testing.assert_array_equal(centers.sizes, written.sizes)
        assert written.names is not None
    assert mlcd.cluster(tmp_path / "embeddings", 12).sizes.sum() == 160  # a fifth is held out


def test_labels_are_the_nearest_centers(digits, photos, tmp_path):
    centers = mlcd.cluster(photos.vectors, 12)
    labels = mlcd.label(photos.vectors, centers, top=3)
    cosines = photos.vectors.astype(np.float64) @ centers.vectors.astype(np.float64).T
    np.testing.assert_array_equal(labels.ids, np.argsort(-cosines, axis=1, kind="stable")[:, :3])
    np.testing.assert_allclose(labels.similarities, -np.sort(-cosines, axis=1)[:, :3], atol=1e-6)
    np.testing.assert_array_equal(
        mlcd.label(photos.vectors, centers.vectors * 2, top=3).ids, labels.ids
    )
    few = mlcd.label(photos.vectors, centers, top=3, threshold=0.9)
    assert ((few.ids >= 0) == (labels.similarities >= 0.9)).all()
    assert np.isneginf(few.similarities[few.ids < 0]).all()

    mlcd.embed(digits, model="hog", out=tmp_path / "embeddings")
    mlcd.cluster(tmp_path / "embeddings", 12, names=True, out=tmp_path / "centers")
    written = mlcd.label(
        tmp_path / "embeddings", tmp_path / "centers", top=3, out=tmp_path / "labels"
    )
    opened = mlcd.label(photos.vectors, tmp_path / "centers", top=3)
    np.testing.assert_array_equal(written.ids, opened.ids)
    np.testing.assert_allclose(written.similarities, opened.similarities, atol=1e-3)
    assert (written.keys, list(written.names)) == (photos.keys, list(opened.names))
    np.testing.assert_array_equal(LabelTable.open(tmp_path / "labels").ids, written.ids)
    images = mlcd.label(digits, tmp_path / "centers", top=3, model="hog")
    np.testing.assert_array_equal(images.ids, written.ids)


def test_an_index_finds_the_nearest_in_memory_and_on_disk(digits, photos, tmp_path):
    queries = photos.vectors[:5] * 7
    cosines = photos.vectors[:5].astype(np.float64) @ photos.vectors.astype(np.float64).T
    expected = [
        [photos.keys[row] for row in rows]
        for rows in np.argsort(-cosines, axis=1, kind="stable")[:, :4]
    ]
    index = mlcd.index(photos.vectors, ids=photos.keys)
    found = index.search(queries, top=4)
    assert (len(index), found.ids) == (200, expected)
    np.testing.assert_allclose(found.similarities, -np.sort(-cosines, axis=1)[:, :4], atol=1e-6)
    mlcd.embed(digits, model="hog", out=tmp_path / "embeddings")
    assert mlcd.index(tmp_path / "embeddings").search(queries, top=4).ids == expected
    for _ in range(2):
        with mlcd.index(tmp_path / "embeddings", out=tmp_path / "collection") as collection:
            assert (len(collection), collection.search(queries, top=4).ids) == (200, expected)
    assert set(mlcd.index(photos.vectors[:3]).search(queries[:1], top=9).ids[0]) == {"0", "1", "2"}


def test_tensors_and_lists_are_taken_where_arrays_are(digits, photos):
    rows = photos.vectors
    tensor = torch.tensor(rows, requires_grad=True)
    centers = mlcd.cluster(rows, 5)
    np.testing.assert_array_equal(mlcd.cluster(tensor, 5).vectors, centers.vectors)
    for given in (rows.tolist(), tensor, torch.tensor(rows)):
        labels = mlcd.label(given, torch.tensor(centers.vectors), top=2)
        np.testing.assert_array_equal(labels.ids, mlcd.label(rows, centers.vectors, top=2).ids)
        assert mlcd.index(given).search(given[:2], top=1).ids == [["0"], ["1"]]
    with pytest.raises(InvalidInput, match=r"rows must be numbers \[N, D\], got list"):
        mlcd.cluster([["a"], ["b"]], 2)
    pixels = np.asarray(Image.open(digits / photos.keys[0]).convert("RGB"))
    with mlcd.load_model("hog") as model:
        np.testing.assert_array_equal(model.embed([torch.tensor(pixels)]), model.embed([pixels]))


def test_every_repr_is_one_short_line(digits, photos, tmp_path):
    mlcd.embed(digits, model="hog", out=tmp_path / "embeddings")
    with mlcd.load_model("hog") as model:
        index = mlcd.index(photos.vectors, ids=photos.keys)
        values = [
            photos,
            mlcd.cluster(photos.vectors, 5),
            mlcd.label(photos.vectors, photos.vectors[:9]),
            index.search(photos.vectors),
            index,
            model,
            mlcd.EmbeddingsArtifact.open(tmp_path / "embeddings"),
        ]
        for value in values:
            assert "\n" not in repr(value)
            assert len(repr(value)) < 400, repr(value)
    assert repr(photos).startswith("EmbeddedImages(keys=<list of 200>, ")
    assert "vectors=float32[200, 1764]" in repr(photos)


def test_a_training_from_python_is_that_of_the_command(digits, tiny_recipe, tmp_path):
    mlcd.embed(digits, model="hog", out=tmp_path / "embeddings")
    mlcd.cluster(tmp_path / "embeddings", 10, out=tmp_path / "centers")
    mlcd.label(tmp_path / "embeddings", tmp_path / "centers", top=2, out=tmp_path / "labels")
    settings = {
        "data.images": digits,
        "data.labels": tmp_path / "labels",
        "data.hold_out": 0.2,
        "schedule.steps": 6,
        "out": tmp_path / "run",
    }
    run = mlcd.train(tiny_recipe, settings)
    assert run.summary["final"]["step"] == 6
    overrides = [f"{key}={value}" for key, value in settings.items()]
    again = call_mlcd("train", tiny_recipe, *overrides, "--json")
    assert json.loads(again.stdout.splitlines()[-1])["digest"] == run.digest
    numbers = mlcd.evaluate(run.path)
    assert 0 <= numbers["knn_accuracy"] <= 1
    shown = call_mlcd("evaluate", "knn", run.path).stdout
    assert f"knn_accuracy {numbers['knn_accuracy']:.4g}" in shown
    with pytest.raises(ConfigInvalid, match=r"data\.label"):
        mlcd.train(tiny_recipe, {"data.label": "x"})


def test_what_cannot_be_is_refused(digits, photos, tmp_path):
    rows = photos.vectors
    index = mlcd.index(rows)
    cases = [
        (lambda: mlcd.embed(tmp_path / "nowhere", model="hog"), NotFound, "nowhere"),
        (lambda: mlcd.embed(digits, model="nothing"), NotFound, "nothing"),
        (lambda: mlcd.cluster(rows, 201), InvalidInput, "201"),
        (lambda: mlcd.cluster(np.full((3, 4), np.nan), 2), InvalidInput, "row 0"),
        (lambda: mlcd.cluster(rows, 2, out=tmp_path / "out"), ConfigInvalid, "need the keys"),
        (lambda: mlcd.cluster(rows, 2, hold_out=0.5), ConfigInvalid, "need the keys"),
        (lambda: mlcd.label(rows, np.ones((4, 9))), InvalidInput, "9"),
        (lambda: mlcd.label(rows, rows[:4], mode="approximate"), ConfigInvalid, "in an artifact"),
        (lambda: mlcd.label(rows, rows[:4], top=0), ConfigInvalid, "top"),
        (lambda: mlcd.label(tmp_path, rows[:4]), ConfigInvalid, "centers in an artifact"),
        (
            lambda: mlcd.embed(digits, model="hog", out="https://images.example/out"),
            ConfigInvalid,
            "got the web address",
        ),
        (lambda: mlcd.cluster("s3:/bucket/e", 2), ConfigInvalid, "neither a path nor a URL"),
        (lambda: mlcd.index(rows, ids=["a"]), InvalidInput, "got 1 ids for 200 rows"),
        (lambda: mlcd.index(rows, out=tmp_path / "out"), ConfigInvalid, "need an artifact"),
        (lambda: index.search(rows[:, :9]), InvalidInput, "shape"),
        (lambda: index.search(rows[0]), InvalidInput, "shape"),
        (lambda: index.search(rows * 0), InvalidInput, "positive norm"),
        (lambda: index.search(rows, top=0), ConfigInvalid, "top"),
    ]
    for call, error, said in cases:
        with pytest.raises(error, match=said):
            call()
    assert not (tmp_path / "out").exists()
    mlcd.embed(digits, model="hog", out=tmp_path / "embeddings")
    with pytest.raises(Conflict):
        mlcd.embed(digits, model="pixels", out=tmp_path / "embeddings")


def test_the_bytes_of_an_open_file_are_an_image(digits):
    with mlcd.load_model("pixels") as model:
        data = io.BytesIO((digits / "3" / "0003.png").read_bytes()).getbuffer()
        assert model.embed([data]).shape == (1, model.dimension)
