"""`mlcd curate`: one image of each group of near duplicates is kept, and the table says why."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mlcd.artifacts.manifest import open_artifact
from mlcd.pipelines.verify import verify
from tests.conftest import call_mlcd


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory, digits):
    """Digits; three of them again, as a copy, as a larger file and a little brighter."""
    folder = tmp_path_factory.mktemp("curate")
    images = folder / "images"
    shutil.copytree(digits, images)
    one, two, three = sorted(images.glob("*/*.png"))[:3]
    shutil.copyfile(one, images / "z-copy.png")
    with Image.open(two) as image:
        image.save(images / "z-larger.bmp")
    with Image.open(three) as image:
        brighter = np.minimum(np.asarray(image).astype(int) * 21 // 20, 255).astype(np.uint8)
    Image.fromarray(brighter).save(images / "z-brighter.png")
    result = call_mlcd("embed", images, folder / "embeddings", "--model", "pixels")
    assert result.returncode == 0, result.stderr
    return folder / "embeddings"


def curated(embeddings, out, *options):
    result = call_mlcd("curate", embeddings, out, "--duplicates", "0.999", *options, "--json")
    assert result.returncode == 0, result.stderr
    rows = pq.read_table(out / "decisions.parquet").to_pylist()
    return json.loads(result.stdout.splitlines()[-1]), {row["key"]: row for row in rows}


def test_one_of_each_group_is_kept(embeddings, tmp_path):
    facts, first = curated(embeddings, tmp_path / "first")
    groups = {}
    for key, row in first.items():
        assert (row["reason"] is None) == row["keep"]
        if row["group"] is None:
            assert row["keep"]
        else:
            groups.setdefault(row["group"], []).append(key)
    assert sorted(groups) == list(range(facts["groups"]))
    assert all(sum(first[key]["keep"] for key in keys) == 1 for keys in groups.values())
    assert all(first[keys[0]]["keep"] for keys in groups.values())
    assert len(groups) >= 3
    assert facts["kept"] == sum(row["keep"] for row in first.values())
    _, largest = curated(embeddings, tmp_path / "largest", "--keep", "largest")
    assert largest["z-larger.bmp"]["keep"]
    assert not first["z-larger.bmp"]["keep"]
    _, best = curated(embeddings, tmp_path / "best", "--keep", "best")
    assert {key: row["group"] for key, row in best.items()} == {
        key: row["group"] for key, row in first.items()
    }
    again, _ = curated(embeddings, tmp_path / "again")
    assert again["digest"] == facts["digest"]
    assert all(finding.checked for finding in verify(tmp_path / "first"))
    assert open_artifact(tmp_path / "first").kind == "selection"


def test_largest_needs_the_images(embeddings, tmp_path):
    shutil.copytree(embeddings, tmp_path / "moved")
    options = ("--duplicates", "0.9", "--keep", "largest")
    result = call_mlcd("curate", tmp_path / "moved", tmp_path / "out", *options)
    assert result.returncode == 2
    assert "there are no images at" in result.stderr
    (tmp_path / "images").mkdir()
    shutil.copyfile(embeddings.parent / "images" / "z-copy.png", tmp_path / "images" / "z-copy.png")
    result = call_mlcd("curate", tmp_path / "moved", tmp_path / "out", *options)
    assert (result.returncode, "lacks the image" in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "out").exists()
