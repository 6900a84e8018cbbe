"""`mlcd curate`: one image of each group of near duplicates is kept, and the table says why."""

import json
import shutil
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import open_artifact
from mlcd.clustering.novelty import nearest
from mlcd.clustering.selection import balanced, outliers
from mlcd.pipelines.verify import verify
from mlcd.types import unit_rows
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


def test_outliers_are_left_out_and_the_rest_is_balanced(embeddings, tmp_path):
    centers, out = tmp_path / "centers", tmp_path / "out"
    made = call_mlcd("cluster", embeddings, centers, "--clusters", 6, "--hold-out", 0)
    assert made.returncode == 0, made.stderr
    options = ("--centers", centers, "--outliers", 0.05, "--balance", 90)
    facts, rows = curated(embeddings, out, *options)
    reasons = Counter(row["reason"] for row in rows.values())
    num = facts["images"] - reasons["duplicate"]
    assert reasons["outlier"] == facts["outlier"] == round(0.05 * num)
    assert reasons[None] == facts["kept"] == 90
    assert reasons["surplus"] == facts["surplus"] == num - facts["outlier"] - 90
    opened, made = EmbeddingsArtifact.open(embeddings), Centers.open(centers)
    ids, _ = nearest(unit_rows(opened.load()), made.vectors)
    of = dict(zip(opened.keys, ids.tolist(), strict=True))
    left = Counter(of[key] for key, row in rows.items() if row["reason"] in (None, "surplus"))
    kept = Counter(of[key] for key, row in rows.items() if row["keep"])
    most = max(kept.values())
    assert all(kept[center] >= min(left[center], most - 1) for center in left)
    dry = call_mlcd(
        "curate", embeddings, tmp_path / "x", "--duplicates", 0.999, *options, "--dry-run", "--json"
    )
    told = json.loads(dry.stdout.splitlines()[-1])
    assert {name: facts[name] for name in told} == told
    assert not (tmp_path / "x").exists()
    for wrong, message in (
        ((), "give one or more of"),
        (("--balance", 9), "give both or neither"),
        (("--duplicates", 0.9, "--centers", centers), "give both or neither"),
    ):
        refused = call_mlcd("curate", embeddings, tmp_path / "x", *wrong)
        assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr


def test_an_outlier_lies_far_out_for_its_own_cluster():
    wide, narrow = np.linspace(0.2, 0.6, 50), np.linspace(0.01, 0.02, 50)
    distances = np.concatenate([wide, narrow, [0.1]]).astype(np.float32)
    found = outliers(np.repeat([3, 7], [50, 51]), distances, 0.01)
    assert np.flatnonzero(found).tolist() == [100]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 70))
def test_a_balance_is_as_even_as_it_can_be(clusters, num):
    assignment = np.array(clusters)
    kept = balanced(assignment, num)
    assert kept.sum() == min(num, len(clusters))
    sizes, taken = np.bincount(assignment), np.bincount(assignment[kept], minlength=6)
    assert all(taken[c] >= min(size, taken.max() - 1) for c, size in enumerate(sizes))
