"""Vectors of other programs become embeddings with the same bits."""

import json
from pathlib import Path

import faiss
import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.errors import ArtifactInvalid, InvalidInput, NotFound
from mlcd.images.sources import open_source
from mlcd.pipelines.import_vectors import import_vectors
from mlcd.pipelines.vector_files import open_vectors, read_keys
from mlcd.pipelines.verify import verify
from mlcd.progress import Reporter
from mlcd.types import unit_rows
from tests.conftest import call_mlcd, write_digits

NUM, DIMENSION = 300, 24
ROWS = unit_rows(np.random.default_rng(0).standard_normal((NUM, DIMENSION)))
KEYS = [f"a/{number}.jpg" for number in range(NUM)]


def run(path, out, keys=None, column=None, **options):
    vectors = open_vectors(path, column=column)
    options = {"model_name": "theirs", "part_entries": 70} | options
    return EmbeddingsArtifact(import_vectors(vectors, keys, out, Reporter(), **options))


def rows_of(embeddings):
    return np.concatenate([embeddings.read(block) for block in embeddings.plan(64)])


def save_npy(folder):
    np.save(folder / "v.npy", ROWS)
    return folder / "v.npy", None


def save_safetensors(folder):
    save_file({"ids": np.arange(NUM), "vectors": ROWS}, folder / "v.safetensors")
    return folder / "v.safetensors", None


def save_parquet(folder):
    columns = {
        "image_path": KEYS,
        "embedding": pa.FixedSizeListArray.from_arrays(ROWS.reshape(-1), DIMENSION),
        "score": np.zeros(NUM),
    }
    pq.write_table(pa.table(columns), folder / "v.parquet", row_group_size=47)
    return folder / "v.parquet", KEYS


def save_lists(folder):
    pq.write_table(pa.table({"v": pa.array(list(ROWS)), "id": range(NUM)}), folder / "v.parquet")
    return folder / "v.parquet", [str(number) for number in range(NUM)]


def save_flat(folder):
    index = faiss.IndexFlatIP(DIMENSION)
    index.add(ROWS)
    faiss.write_index(index, str(folder / "v.faiss"))
    return folder / "v.faiss", None


def save_ids(folder):
    index = faiss.IndexIDMap2(faiss.IndexFlatL2(DIMENSION))
    index.add_with_ids(ROWS, np.arange(NUM) * 3)
    faiss.write_index(index, str(folder / "v.index"))
    return folder / "v.index", [str(3 * number) for number in range(NUM)]


def save_graph(folder):
    index = faiss.IndexHNSWFlat(DIMENSION, 8)
    index.add(ROWS)
    faiss.write_index(index, str(folder / "v.faiss"))
    return folder / "v.faiss", None


def save_cells(folder):
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(DIMENSION), DIMENSION, 4)
    index.train(ROWS)
    index.add(ROWS)
    faiss.write_index(index, str(folder / "v.faiss"))
    return folder / "v.faiss", None


def save_lance(folder):
    """Two versions and two files; a deleted row does not count."""
    names = ["deleted", *KEYS]
    rows = np.concatenate([-ROWS[:1], ROWS])
    vectors = pa.FixedSizeListArray.from_arrays(rows.reshape(-1), DIMENSION)
    table = pa.table({"id": names, "vector": vectors, "caption": [""] * len(names)})
    dataset = lance.write_dataset(table, folder / "v.lance", max_rows_per_file=200)
    dataset.delete("id = 'deleted'")
    return folder / "v.lance", KEYS


def save_clip_retrieval(folder):
    """Twelve files, so that the tenth comes after the ninth only by its number."""
    (folder / "img_emb").mkdir()
    (folder / "metadata").mkdir()
    for number, part in enumerate(np.array_split(np.arange(NUM), 12)):
        np.save(folder / "img_emb" / f"img_emb_{number}.npy", ROWS[part])
        table = pa.table({"image_path": [KEYS[row] for row in part], "caption": [""] * len(part)})
        pq.write_table(table, folder / "metadata" / f"metadata_{number}.parquet")
    return folder, KEYS


@pytest.mark.parametrize(
    "save",
    [
        save_npy,
        save_safetensors,
        save_parquet,
        save_lists,
        save_flat,
        save_ids,
        save_graph,
        save_cells,
        save_lance,
        save_clip_retrieval,
    ],
)
def test_rows_have_the_bits_of_the_source(tmp_path, save):
    (folder := tmp_path / "theirs").mkdir()
    path, keys = save(folder)
    imported = run(path, tmp_path / "out")
    assert rows_of(imported).tobytes() == ROWS.tobytes()
    assert list(imported.keys) == (keys or [f"{number:08d}" for number in range(NUM)])
    assert imported.artifact.summary["errors"] == 0
    assert {finding.kind for finding in verify(tmp_path / "out")} == {"embeddings", "vectors"}


FIFTYONE = Path(__file__).parents[1] / "fiftyone_export"


def test_an_export_of_fiftyone_gives_its_vectors_by_the_files_of_its_media(tmp_path):
    """FiftyOne 1.22.1 exported six samples, the fourth without an `embedding`."""
    theirs = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    theirs /= np.linalg.norm(theirs, axis=1, keepdims=True)
    imported = run(FIFTYONE, tmp_path / "out", column="embedding")
    assert list(imported.keys) == [f"cats/{number}.png" for number in (0, 1, 2, 4, 5)]
    assert rows_of(imported).tobytes() == np.delete(theirs, 3, axis=0).tobytes()
    (error,) = map(json.loads, imported.errors_file.read_text().splitlines())
    assert (error["key"], error["reason"]) == ("cats/3.png", "no-embedding")
    half = run(FIFTYONE, tmp_path / "half", column="half")
    stored = np.load(half.artifact.path / "part-00000.npy")
    assert stored.tobytes() == theirs.astype(np.float16).tobytes()
    with pytest.raises(InvalidInput, match="name one with --column: embedding, half"):
        run(FIFTYONE, tmp_path / "none")
    for text in (
        "{}",
        '{"samples": [{"filepath": 3}]}',
        "[",
        '{"samples": [{"e": {"$binary": {}}}]}',
    ):
        (tmp_path / "samples.json").write_text(text)
        with pytest.raises(InvalidInput, match=r"samples\.json"):
            run(tmp_path, tmp_path / "none")


def test_half_precision_stays_and_other_rows_are_normalized(tmp_path):
    half = ROWS.astype(np.float16)
    np.save(tmp_path / "half.npy", half)
    imported = run(tmp_path / "half.npy", tmp_path / "half")
    assert np.load(imported.artifact.path / "part-00000.npy").tobytes() == half[:70].tobytes()
    wide = np.random.default_rng(1).standard_normal((NUM, DIMENSION)) * 1e3
    wide[1], wide[2, 3], wide[3, 0] = 0, np.nan, np.inf
    np.save(tmp_path / "wide.npy", wide)
    imported = run(tmp_path / "wide.npy", tmp_path / "wide")
    expected = unit_rows(np.delete(wide, [1, 2, 3], axis=0))
    np.testing.assert_array_equal(rows_of(imported), expected)
    errors = [*map(json.loads, imported.errors_file.read_text().splitlines())]
    assert [(error["key"], error["reason"]) for error in errors] == [
        (f"{number:08d}", "no-embedding") for number in (1, 2, 3)
    ]


def test_images_give_classes_and_digests_and_what_does_not_fit_is_listed(tmp_path):
    images = write_digits(tmp_path / "images", 20)
    source = open_source(str(images))
    names = [*source.entries.keys()]
    np.save(tmp_path / "v.npy", ROWS[:20])
    keys = [f"./{name}" for name in reversed(names[1:])] + ["absent.png"]  # spelled otherwise
    imported = run(tmp_path / "v.npy", tmp_path / "out", keys, images=source)
    assert list(imported.keys) == [*reversed(names[1:])]
    assert rows_of(imported).tobytes() == ROWS[:19].tobytes()
    embedded = tmp_path / "pixels"
    assert call_mlcd("embed", images, embedded, "--model", "pixels").returncode == 0
    ours = pq.read_table(embedded / "part-00000.keys.parquet").to_pylist()
    theirs = pq.read_table(tmp_path / "out" / "part-00000.keys.parquet").to_pylist()
    by_key = {row["key"]: row for row in ours}
    for row in theirs:
        assert (row["class_name"], row["sha256"]) == (
            by_key[row["key"]]["class_name"],
            by_key[row["key"]]["sha256"],
        )
    errors = [*map(json.loads, imported.errors_file.read_text().splitlines())]
    assert [(error["key"], error["reason"]) for error in errors] == [
        ("absent.png", "no-image"),
        (names[0], "no-vector"),
    ]


def test_an_import_that_breaks_off_goes_on_with_the_same_bytes(tmp_path, monkeypatch):
    path, _ = save_npy(tmp_path)
    whole = run(path, tmp_path / "whole").artifact
    calls = []

    def break_off(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as patched:
        original = __import__("mlcd.pipelines.import_vectors", fromlist=["x"]).write_encoded
        patched.setattr("mlcd.pipelines.import_vectors.write_encoded", break_off)
        with pytest.raises(KeyboardInterrupt):
            run(path, tmp_path / "again")
    assert run(path, tmp_path / "again").artifact.files == whole.files


def test_what_cannot_be_imported_is_named(tmp_path):
    path, _ = save_npy(tmp_path)
    compressed = faiss.IndexPQ(DIMENSION, 4, 4)
    compressed.train(ROWS)
    compressed.add(ROWS)
    faiss.write_index(compressed, str(tmp_path / "pq.faiss"))
    np.save(tmp_path / "whole.npy", np.arange(10))
    np.save(tmp_path / "zeros.npy", np.zeros((3, 4), np.float32))
    pickled = np.empty(2, object)
    np.save(tmp_path / "pickled.npy", pickled, allow_pickle=True)
    (tmp_path / "cut.npy").write_bytes(path.read_bytes()[:1000])
    (tmp_path / "text.parquet").write_text("no table")
    (tmp_path / "empty").mkdir()
    save_file({"a": ROWS, "b": ROWS}, tmp_path / "two.safetensors")
    uneven = pa.table({"v": pa.array([[1.0, 0.0], [1.0]])})
    pq.write_table(uneven, tmp_path / "uneven.parquet")
    for name, message in (
        ("pq.faiss", "must hold its vectors exactly, got IndexPQ"),
        ("whole.npy", r"floats of shape \[N, D\], got int64 of shape \[10\]"),
        ("zeros.npy", "none of the 3 vectors"),
        ("pickled.npy", "cannot be read as .npy"),
        ("cut.npy", "cannot be read as .npy"),
        ("text.parquet", "cannot be read as .parquet"),
        ("two.safetensors", r"must have one tensor \[N, D\], got 2: name one with --column: a, b"),
        ("uneven.parquet", r"must have one length, got \[1, 2\]"),
        ("empty", "must have the folder img_emb"),
    ):
        with pytest.raises(InvalidInput, match=message):
            run(tmp_path / name, tmp_path / "out")
    assert rows_of(run(tmp_path / "two.safetensors", tmp_path / "b", column="b")).shape == (300, 24)
    with pytest.raises(NotFound, match="no vectors at"):
        run(tmp_path / "absent.npy", tmp_path / "out")
    for keys, message in (
        (["a"], "got 1 keys for 300 vectors"),
        (["a"] * NUM, "the key of row 1 a repeats an earlier one"),
        ([""] * NUM, "the key of row 0 is empty"),
    ):
        with pytest.raises(InvalidInput, match=message):
            run(path, tmp_path / "out", keys)
    assert not (tmp_path / "out").exists()
    run(path, tmp_path / "kept")
    np.save(path, -ROWS)
    with pytest.raises(ArtifactInvalid, match="does not contain the vectors"):
        list(verify(tmp_path / "kept"))


def test_the_command_clusters_labels_and_keeps_spaces_apart(tmp_path):
    path, _ = save_npy(tmp_path)
    (tmp_path / "odd.txt").write_text("a\u2028b.jpg\r\nc\r\n", newline="")
    assert read_keys(tmp_path / "odd.txt") == ["a\u2028b.jpg", "c"]
    (tmp_path / "keys.txt").write_text("".join(f"{key}\n" for key in KEYS))
    ours, other, centers = (tmp_path / name for name in ("ours", "other", "centers"))
    given = ("import", path, ours, "--model-name", "theirs", "--keys", tmp_path / "keys.txt")
    done = call_mlcd(*given)
    assert (done.returncode, "300 embeddings of 24" in done.stderr + done.stdout) == (0, True)
    assert call_mlcd("import", path, other, "--model-name", "another").returncode == 0
    assert call_mlcd("cluster", ours, centers, "--clusters", 5).returncode == 0
    assert call_mlcd("label", ours, tmp_path / "labels", "--centers", centers).returncode == 0
    assert call_mlcd("index", ours, tmp_path / "collection").returncode == 0
    refused = call_mlcd("label", other, tmp_path / "wrong", "--centers", centers)
    assert (refused.returncode, "must be of the same model" in refused.stderr) == (2, True)
