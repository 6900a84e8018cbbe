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

from mlcd.artifacts.center_levels import read_groups
from mlcd.artifacts.centers import Centers
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import open_artifact
from mlcd.artifacts.selection import Selection
from mlcd.clustering.nearest import nearest_with_distances
from mlcd.clustering.sampling import balanced, outliers
from mlcd.pipelines import extract
from mlcd.pipelines.curation import leaving_out
from mlcd.pipelines.verify import verify
from mlcd.types import unit_rows
from tests.conftest import call_mlcd, refuse, succeed


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
    succeed("embed", images, folder / "embeddings", "--model", "pixels")
    return folder / "embeddings"


def curated(embeddings, out, *options):
    result = succeed("curate", embeddings, out, "--duplicates", "0.999", *options, "--json")
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
    refuse("curate", tmp_path / "moved", tmp_path / "out", *options, contains="no images at")
    (tmp_path / "images").mkdir()
    shutil.copyfile(embeddings.parent / "images" / "z-copy.png", tmp_path / "images" / "z-copy.png")
    refuse("curate", tmp_path / "moved", tmp_path / "out", *options, contains="lacks the image")
    assert not (tmp_path / "out").exists()


def test_outliers_are_left_out_and_the_rest_is_balanced(embeddings, tmp_path):
    centers, out = tmp_path / "centers", tmp_path / "out"
    succeed("cluster", embeddings, centers, "--clusters", 6, "--hold-out", 0)
    options = ("--centers", centers, "--outliers", 0.05, "--balance", 90)
    facts, rows = curated(embeddings, out, *options)
    reasons = Counter(row["reason"] for row in rows.values())
    num = facts["images"] - reasons["duplicate"]
    assert reasons["outlier"] == facts["outlier"] == round(0.05 * num)
    assert reasons[None] == facts["kept"] == 90
    assert reasons["surplus"] == facts["surplus"] == num - facts["outlier"] - 90
    opened, made = EmbeddingsArtifact.open(embeddings), Centers.open(centers)
    ids, _ = nearest_with_distances(unit_rows(opened.load()), made.vectors)
    of = dict(zip(opened.keys, ids.tolist(), strict=True))
    left = Counter(of[key] for key, row in rows.items() if row["reason"] in (None, "surplus"))
    kept = Counter(of[key] for key, row in rows.items() if row["keep"])
    most = max(kept.values())
    assert all(kept[center] >= min(left[center], most - 1) for center in left)
    dry = call_mlcd(
        "curate --duplicates 0.999 --dry-run --json", embeddings, tmp_path / "x", *options
    )
    told = json.loads(dry.stdout.splitlines()[-1])
    assert {name: facts[name] for name in told} == told
    assert not (tmp_path / "x").exists()
    for wrong, message in (
        ((), "give one or more of"),
        (("--balance", 9), "give both or neither"),
        (("--duplicates", 0.9, "--centers", centers), "give both or neither"),
    ):
        refuse("curate", embeddings, tmp_path / "x", *wrong, contains=message)


def test_an_outlier_lies_far_out_for_its_own_cluster():
    wide, narrow = np.linspace(0.2, 0.6, 50), np.linspace(0.01, 0.02, 50)
    distances = np.concatenate([wide, narrow, [0.1]]).astype(np.float32)
    found = outliers(np.repeat([3, 7], [50, 51]), distances, 0.01)
    assert np.flatnonzero(found).tolist() == [100]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 70))
def test_a_balance_is_as_even_as_it_can_be(clusters, num):
    assignment = np.array(clusters)
    kept = balanced([assignment], num)
    assert kept.sum() == min(num, len(clusters))
    sizes, taken = np.bincount(assignment), np.bincount(assignment[kept], minlength=6)
    assert all(taken[c] >= min(size, taken.max() - 1) for c, size in enumerate(sizes))


def test_the_images_that_are_kept_are_embedded_alone(embeddings, tmp_path):
    curated(embeddings, tmp_path / "chosen")
    images, options = embeddings.parent / "images", ("--model", "pixels", "--selection")
    succeed("embed", images, tmp_path / "kept", *options, tmp_path / "chosen")
    opened, kept = EmbeddingsArtifact.open(embeddings), EmbeddingsArtifact.open(tmp_path / "kept")
    assert kept.keys == Selection.open(tmp_path / "chosen").read_keys().to_pylist()
    assert 0 < len(kept.keys) < len(opened.keys)
    split_of = dict(zip(opened.keys, opened.splits.tolist(), strict=True))
    assert kept.splits.tolist() == [split_of[key] for key in kept.keys]
    assert {parent.role for parent in kept.artifact.parents} == {"images", "selection"}
    assert all(finding.checked for finding in verify(tmp_path / "kept"))
    refuse(
        "embed --model pixels --append",
        images,
        tmp_path / "kept",
        contains="which cannot be extended",
    )
    (tmp_path / "others").mkdir()
    shutil.copyfile(images / "z-larger.bmp", tmp_path / "others" / "a.bmp")
    others = (tmp_path / "others", tmp_path / "x", *options, tmp_path / "chosen")
    refuse("embed", *others, contains="lacks all images of the selection")


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=60),
    st.integers(1, 70),
    st.integers(0, 3),
)
def test_a_hierarchical_sample_is_even_on_each_level(clusters, num, seed):
    fine = np.array(clusters)
    coarse = np.array([0, 0, 0, 1, 1, 1, 1, 2])[fine]
    kept = balanced([fine, coarse], num, seed=seed)
    assert kept.sum() == min(num, len(fine))
    for groups, within in ((coarse, np.zeros(len(fine), int)), (fine, coarse)):
        for above in np.unique(within):
            sizes = np.bincount(groups[within == above], minlength=8)
            taken = np.bincount(groups[(within == above) & kept], minlength=8)
            assert all(taken[c] >= min(size, taken.max() - 1) for c, size in enumerate(sizes))


def test_a_hierarchical_sample_needs_levels(embeddings, tmp_path):
    for name, how in (("flat", ("--clusters", 12)), ("levels", ("--levels", "12,3"))):
        succeed("cluster", embeddings, tmp_path / name, *how, "--hold-out", 0)
    options = ("--hierarchical", 90, "--centers")
    refuse(
        "curate",
        embeddings,
        tmp_path / "x",
        *options,
        tmp_path / "flat",
        contains="needs levels of clusters",
    )
    both = (*options, tmp_path / "levels", "--balance", 9)
    refuse("curate", embeddings, tmp_path / "x", *both, contains="exclude each other")
    facts, rows = curated(embeddings, tmp_path / "out", *options, tmp_path / "levels")
    assert facts["kept"] == sum(row["keep"] for row in rows.values()) == 90
    opened, made = EmbeddingsArtifact.open(embeddings), Centers.open(tmp_path / "levels")
    ids, _ = nearest_with_distances(unit_rows(opened.load()), made.vectors)
    (coarse,) = read_groups(open_artifact(tmp_path / "levels"))
    of = dict(zip(opened.keys, coarse[ids].tolist(), strict=True))
    sizes = Counter(of[key] for key, row in rows.items() if row["reason"] != "duplicate")
    kept = Counter(of[key] for key, row in rows.items() if row["keep"])
    assert all(kept[c] >= min(sizes[c], max(kept.values()) - 1) for c in sizes)


@pytest.fixture
def odd_embeddings(tmp_path):
    """Noise, a dark and a broken image among it."""
    rng = np.random.default_rng(0)
    (tmp_path / "odd").mkdir()
    for number in range(12):
        pixels = rng.integers(0, 50 if number == 3 else 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "odd" / f"{number:02d}.png")
    succeed("embed", tmp_path / "odd", tmp_path / "embeddings", "--model", "pixels")
    (tmp_path / "odd" / "05.png").write_bytes(b"broken since")
    return tmp_path / "embeddings"


def test_issues_of_the_pixels_are_reasons(odd_embeddings, tmp_path, monkeypatch):
    command = ("curate", odd_embeddings, tmp_path / "out", "--issues")
    refuse(*command, "dark,nice", contains="must be one of odd-size")
    scored = []
    scores = leaving_out.scores_all

    def killed(source, entries, **options):
        scored.append(len(entries))
        if len(scored) == 3:
            raise KeyboardInterrupt
        return scores(source, entries, **options)

    monkeypatch.setattr(leaving_out, "PART_ENTRIES", 5)
    monkeypatch.setattr(leaving_out, "scores_all", killed)
    assert call_mlcd(*command, "dark,low-information").returncode == 130
    result = succeed(*command, "dark,low-information")
    assert "10 of 12 images kept, 1 dark, 1 unreadable" in result.stdout
    assert scored == [5, 5, 2, 2]  # only what was not scored before
    rows = pq.read_table(tmp_path / "out" / "decisions.parquet").to_pylist()
    left_out = {row["key"]: row["reason"] for row in rows if not row["keep"]}
    assert left_out == {"03.png": "dark", "05.png": "unreadable"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "decisions.parquet",
        "manifest.json",
    ]


def test_leaks_are_near_duplicates_of_another_set(embeddings, tmp_path):
    images = embeddings.parent / "images"
    names = sorted(path.relative_to(images).as_posix() for path in images.rglob("*.png"))[:40]
    for name in names:
        (tmp_path / "test" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(images / name, tmp_path / "test" / name)
    succeed("embed", tmp_path / "test", tmp_path / "against", "--model", "pixels")
    options = ("--leaks", 0.999, "--against")
    facts, rows = curated(embeddings, tmp_path / "out", *options, tmp_path / "against")
    own, other = (EmbeddingsArtifact.open(path) for path in (embeddings, tmp_path / "against"))
    cosines = unit_rows(own.load()).astype(float) @ unit_rows(other.load()).T.astype(float)
    leaked = {key for key, near in zip(own.keys, (cosines >= 0.999).any(1), strict=True) if near}
    assert {key for key, row in rows.items() if row["reason"] == "leak"} == leaked
    assert facts["leak"] == len(leaked) >= 40
    # one of a group is kept where it is no leak
    assert all(row["keep"] or row["reason"] in ("leak", "duplicate") for row in rows.values())
    roles = {parent.role for parent in open_artifact(tmp_path / "out").parents}
    assert roles == {"embeddings", "against"}
    succeed("embed", tmp_path / "test", tmp_path / "hog", "--model", "hog")
    for wrong, message in (
        ((*options, tmp_path / "hog"), "of the same model"),
        (options[:2], "give both or neither"),
    ):
        refuse("curate", embeddings, tmp_path / "x", *wrong, contains=message)


@pytest.mark.parametrize("form", ["links", "tar", "parquet"])
def test_what_is_kept_is_a_set_of_images_again(form, embeddings, tmp_path, monkeypatch):
    curated(embeddings, tmp_path / "chosen")
    monkeypatch.setattr(extract, "_SHARD_IMAGES", 64)
    command = ("extract", tmp_path / "chosen", tmp_path / "out", "--as", form)
    read = extract.KeptImages.read
    num_read = []

    def killed(self, entry):
        num_read.append(entry.key)
        if len(num_read) == 100:
            raise KeyboardInterrupt
        return read(self, entry)

    monkeypatch.setattr(extract.KeptImages, "read", killed)
    result = call_mlcd(*command)
    if form != "links":
        assert result.returncode == 130
        assert not (tmp_path / "out").exists()
        result = call_mlcd(*command)
        assert len(num_read) - len(set(num_read)) < 64
    assert result.returncode == 0, result.stderr
    again = call_mlcd(*command)
    assert again.returncode == (2 if form == "links" else 0)
    succeed("embed", tmp_path / "out", tmp_path / "kept", "--model", "pixels")
    whole, kept = EmbeddingsArtifact.open(embeddings), EmbeddingsArtifact.open(tmp_path / "kept")
    keys = Selection.open(tmp_path / "chosen").read_keys().to_pylist()
    facts = dict(
        zip(whole.keys, zip(whole.image_sha256, whole.class_names, strict=True), strict=True)
    )
    expected = [facts[key] for key in keys]
    assert list(zip(kept.image_sha256, kept.class_names, strict=True)) == expected
    if form != "tar":
        assert kept.keys == keys


def test_what_cannot_be_extracted_is_told(embeddings, tmp_path):
    curated(embeddings, tmp_path / "chosen")
    folder = tmp_path / "images"
    shutil.copytree(embeddings.parent / "images", folder)
    (folder / "0").rename(folder / "elsewhere")
    command = ("extract", tmp_path / "chosen", tmp_path / "out", "--as")
    refuse(*command, "tar", "--images", folder, contains="lacks the image 0/")
    succeed(*command, "parquet")
    chosen = ("extract", tmp_path / "chosen", tmp_path / "links", "--as", "links", "--images")
    refuse(*chosen, tmp_path / "out", contains="files on this disk")
    assert not (tmp_path / "links").exists()


def test_the_report_shows_what_is_left_out_and_asks_for_nothing(embeddings, tmp_path):
    images = tmp_path / "images"
    shutil.copytree(embeddings.parent / "images" / "0", images)
    first = min(images.iterdir())
    hostile = "<script>alert(1)</script> ü.png".replace("/", "_")
    shutil.copyfile(first, images / hostile)
    succeed("embed", images, tmp_path / "embeddings", "--model", "pixels")
    facts, _ = curated(tmp_path / "embeddings", tmp_path / "out", "--report")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert facts["groups"] >= 1
    assert "&lt;script&gt;alert(1)&lt;_script&gt; ü.png" in page
    assert "<script" not in page
    assert page.count("data:image/webp;base64,") >= 2
    assert 'class="kept"' in page
    assert "http:" not in page
    assert "https:" not in page
    again, _ = curated(tmp_path / "embeddings", tmp_path / "again", "--report")
    assert again["digest"] == facts["digest"]
    first.unlink()
    refuse(
        "curate --duplicates 1 --report",
        tmp_path / "embeddings",
        tmp_path / "x",
        contains="lacks the image",
    )
