"""`mlcd index`: collections from embeddings and from parquet, export, near-duplicates, and what is
refused.
"""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.cli import main
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.errors import ArtifactInvalid
from mlcd.images.thumbnail import thumbnail
from mlcd.pipelines.verify import verify
from mlcd.types import unit_rows
from tests.conftest import call_mlcd, refuse, succeed
from tests.written_artifacts import write_embeddings


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    """Two parts of 70 and 50 rows; row 100 is nearly row 3, row 101 is row 3."""
    out = tmp_path_factory.mktemp("embeddings") / "e"
    rows = unit_rows(np.random.default_rng(0).standard_normal((120, 12)))
    rows[100] = unit_rows(rows[3:4] + 0.01 * rows[50:51])[0]
    rows[101] = rows[3]
    keys = [f"k{n}" for n in range(120)]
    classes = [None if n % 3 else "third" for n in range(120)]
    return write_embeddings(out, [rows[:70], rows[70:]], keys, classes, fingerprint="c" * 64)


def read(path):
    with Collection.open(path, background=False) as collection:
        items = {item.id: item for block in collection.items() for item in block}
        return items, collection.describe()


def test_embeddings_become_a_collection_that_goes_to_parquet_and_back(embeddings, tmp_path):
    made = succeed("index", embeddings, tmp_path / "c", "--recall", "0.9", "--json")
    facts = json.loads(made.stdout.splitlines()[-1])
    assert (facts["items"], facts["indexed"], facts["recall_target"]) == (120, 120, 0.9)
    items, described = read(tmp_path / "c")
    rows = EmbeddingsArtifact.open(embeddings).load()
    assert all((items[f"k{n}"].embedding == row).all() for n, row in enumerate(rows))
    assert items["k3"].metadata == {"class_name": "third"}
    assert items["k4"].metadata == {}
    assert described.fingerprint == "c" * 64
    assert [finding.kind for finding in verify(tmp_path / "c")] == [
        "collection-index",
        "collection",
        "embeddings",
    ]
    damaged = shutil.copytree(tmp_path / "c", tmp_path / "damaged")
    ledger = (damaged / "items.sqlite").read_bytes()
    place = ledger.index(rows[7].tobytes())
    (damaged / "items.sqlite").write_bytes(
        ledger[:place] + bytes([ledger[place] ^ 1]) + ledger[place + 1 :]
    )
    with pytest.raises(ArtifactInvalid, match=r"the vector of item 8 .* is damaged"):
        list(verify(damaged))
    with Collection.open(tmp_path / "c", background=False):
        open_elsewhere = [finding for finding in verify(tmp_path / "c") if not finding.checked]
    assert [finding.kind for finding in open_elsewhere] == ["collection"]

    exported = call_mlcd("index", tmp_path / "c", tmp_path / "c.parquet", "--export")
    assert (exported.returncode, exported.stdout.split()[0]) == (0, "120")
    succeed("index", tmp_path / "c.parquet", tmp_path / "d")
    again, _ = read(tmp_path / "d")
    assert again.keys() == items.keys()
    for item_id, item in items.items():
        assert (again[item_id].embedding == item.embedding).all()
        assert again[item_id].metadata == item.metadata


def test_a_collection_half_made_is_finished_and_another_is_refused(embeddings, tmp_path):
    succeed("index", embeddings, tmp_path / "c")
    with Collection.open(tmp_path / "c", background=False) as collection:
        for n in range(60, 120):
            collection.delete(f"k{n}")
    succeed("index", embeddings, tmp_path / "c")
    items, described = read(tmp_path / "c")
    assert len(items) == described.indexed == 120
    before = described.generation
    succeed("index", embeddings, tmp_path / "c")
    assert read(tmp_path / "c")[1].generation == before  # nothing to do
    refuse("index --recall 0.5", embeddings, tmp_path / "c", contains="other input or settings")


@pytest.mark.parametrize("kind", ["embeddings", "collection"])
def test_near_duplicates_are_grouped(embeddings, tmp_path, kind):
    source = embeddings
    if kind == "collection":
        source = tmp_path / "c"
        succeed("index", embeddings, source)
    found = call_mlcd("index", source, tmp_path / "groups.jsonl", "--duplicates", "0.99")
    assert (found.returncode, found.stdout.split(":")[0]) == (0, "1 group of 3 items")
    (line,) = (tmp_path / "groups.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["ids"]) == ["k100", "k101", "k3"]


@pytest.fixture
def refused(monkeypatch, capsys):
    """The command in this process: twelve interpreters would take longer than all that is
    tested.
    """

    def call(contains, *arguments):
        monkeypatch.setattr("sys.argv", ["mlcd", "index", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert ended.value.code == 2
        assert contains in said.err
        assert (len(said.err.splitlines()), said.out) == (1, "")

    return call


def test_a_name_with_a_line_feed_is_refused_before_anything_is_written(refused, digits, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for name, image in zip(("a", "line\nfeed"), digits.rglob("*.png"), strict=False):
        shutil.copy(image, images / f"{name}.png")
    succeed("embed", images, tmp_path / "e", "--model", "pixels")
    refused(r"'line\nfeed.png' has the control character U+000A", tmp_path / "e", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_what_cannot_be_is_said_in_one_line(refused, embeddings, tmp_path):
    collection = tmp_path / "c"
    with Collection.create(collection, fingerprint="a" * 64, dimension=12) as made:
        made.add([Item("x", np.ones(12))])
        refused("another process", collection, tmp_path / "f.parquet", "--export")
    out = tmp_path / "out"
    refused("exclude each other", embeddings, out, "--export", "--duplicates", "0.9")
    refused("cannot be combined with --export", embeddings, out, "--export", "--recall", "0.9")
    refused("recall must be in", embeddings, out, "--recall", "1.5")
    refused("must be a cosine", embeddings, out, "--duplicates", "7")
    refused("no collection at", embeddings, out, "--export")
    refused("other input or settings", embeddings, collection)
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "other.parquet")
    refused("not an exported collection", tmp_path / "other.parquet", out)
    (tmp_path / "text.parquet").write_text("nothing")
    refused("not a readable parquet", tmp_path / "text.parquet", out)
    assert not out.exists()
    succeed("index", collection, tmp_path / "f.parquet", "--export")
    refused("f.parquet exists", collection, tmp_path / "f.parquet", "--export")
    shutil.copytree(collection, tmp_path / "kept")
    (tmp_path / "f.parquet").write_bytes((tmp_path / "f.parquet").read_bytes()[:-100])
    refused("not a readable parquet", tmp_path / "f.parquet", out)


@pytest.fixture
def pictured(digits, tmp_path):
    """Embeddings of 200 images, of which one cannot be used any more."""
    images = tmp_path / "images"
    shutil.copytree(digits, images)
    succeed("embed", images, tmp_path / "e", "--model", "pixels")
    keys = EmbeddingsArtifact.open(tmp_path / "e").keys
    (images / keys[3]).write_bytes(b"no image any more")
    (images / keys[4]).unlink()
    return tmp_path, keys


def test_thumbnails_are_made_of_the_images_that_were_embedded(pictured):
    folder, keys = pictured
    path = folder / "c"
    command = ("index", folder / "e", path, "--json")
    bounded = succeed(*command, "--thumbnail-bytes", "3000")
    assert "reached 3000 bytes, so the remaining items have none" in bounded.stderr
    with Collection.open(path, read_only=True) as collection:
        some = len(keys) - len(collection.without_thumbnail())
        assert 0 < some < len(keys)
    made = succeed(*command)
    facts = json.loads(made.stdout.splitlines()[-1])
    assert (facts["thumbnails"]["unusable"], facts["thumbnails"]["missing"]) == (1, 1)
    assert facts["thumbnails"]["items"] == len(keys) - 2
    with Collection.open(path, read_only=True) as collection:
        assert sorted(collection.without_thumbnail()) == sorted(keys[3:5])
        data = (folder / "images" / keys[9]).read_bytes()
        assert collection.thumbnail(keys[9]) == thumbnail(data)
    succeed("index", path, path, "--images", folder / "images", "--json")


def test_a_collection_without_thumbnails_is_made_where_images_are_gone_or_not_wanted(pictured):
    folder, keys = pictured
    bare = call_mlcd("index", folder / "e", folder / "bare", "--no-thumbnails")
    (folder / "images").rename(folder / "moved")
    gone = call_mlcd("index", folder / "e", folder / "gone")
    assert (bare.returncode, gone.returncode) == (0, 0), gone.stderr
    assert "thumbnails" not in bare.stdout + bare.stderr
    assert "no thumbnails were made: the images of" in gone.stderr
    for name in ("bare", "gone"):
        with Collection.open(folder / name, read_only=True) as collection:
            assert len(collection.without_thumbnail()) == len(keys)
    again = call_mlcd("index", folder / "e", folder / "gone", "--images", folder / "moved")
    assert f"{len(keys) - 2} thumbnails" in again.stdout, again.stderr
    succeed("index", folder / "gone", folder / "copy")
    with Collection.open(folder / "gone") as given, Collection.open(folder / "copy") as copy:
        assert copy.read_thumbnails(keys) == given.read_thumbnails(keys)
        assert sorted(copy.without_thumbnail()) == sorted(keys[3:5])
    nowhere = call_mlcd("index", folder / "e", folder / "gone", "--images", folder / "nowhere")
    assert nowhere.returncode == 2


def test_a_layout_by_t_sne_is_the_same_again_and_pca_removes_it(pictured):
    folder, _ = pictured
    layouts = []
    for name in ("c1", "c2"):
        succeed("index", folder / "e", folder / name, "--layout", "tsne")
        with Collection.open(folder / name, read_only=True) as collection:
            layouts.append(collection.layout())
    assert [layout.method for layout in layouts] == ["tsne", "tsne"]
    assert np.array_equal(layouts[0].points, layouts[1].points)
    assert np.abs(layouts[0].points).max() == pytest.approx(1)
    succeed("index", folder / "c1", folder / "c1", "--layout", "pca")
    with Collection.open(folder / "c1", read_only=True) as collection:
        assert collection.layout().method == "pca"


def test_what_thumbnails_and_layouts_do_not_go_with(embeddings, tmp_path):
    for given in (("--export",), ("--duplicates", "0.9")):
        refuse(
            "index --layout pca", embeddings, tmp_path / "c", *given, contains="cannot be combined"
        )
