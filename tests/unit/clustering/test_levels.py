"""Levels of clusters: each partitions the next, and loses little against k-means at its number."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcd.artifacts.manifest import open_artifact
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.levels import build_levels, composed
from mlcd.errors import InvalidInput
from mlcd.types import unit_rows
from tests.conftest import call_mlcd


@st.composite
def weighted(draw):
    """Unit centers, some of them equal or opposite; sizes and cosines, some of them nothing."""
    num = draw(st.integers(2, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    points = generator.standard_normal((max(1, num // draw(st.integers(1, 3))), 3))
    centers = unit_rows(points[generator.integers(0, len(points), num)])
    centers[generator.random(num) < 0.2] *= -1
    sizes = generator.integers(0, 9, num)
    sizes[0] = 1  # there are no clusters of nothing
    cosines = np.where(sizes > 0, generator.random(num), np.nan)
    nums = draw(st.lists(st.integers(1, num - 1), min_size=1, max_size=3, unique=True))
    return centers, sizes, cosines, sorted(nums, reverse=True)


@settings(max_examples=40, deadline=None)
@given(weighted())
def test_each_level_is_a_partition_of_the_next_without_empty_clusters(made):
    centers, sizes, cosines, nums = made
    levels = build_levels(centers, sizes, cosines, nums)
    num = len(centers)
    for level, expected in zip(levels, nums, strict=True):
        assert level.groups.shape == (num,)
        assert set(level.groups.tolist()) == set(range(expected))
        assert np.linalg.norm(level.centers, axis=1) == pytest.approx(1, abs=1e-5)
        num = expected
    finer = np.arange(len(centers))
    for of in composed(levels):
        # two centers that a level joins are together on every coarser one
        assert len(np.unique(np.stack([finer, of]), axis=1).T) == len(np.unique(finer))
        finer = of
    again = build_levels(centers, sizes, cosines, nums)
    assert all((a.centers == b.centers).all() for a, b in zip(levels, again, strict=True))


@pytest.mark.parametrize("nums", [(8,), (9, 3), (3, 3), (3, 4), (3, 0)])
def test_numbers_that_do_not_fall_are_refused(nums):
    centers = unit_rows(np.random.default_rng(0).standard_normal((8, 4)))
    with pytest.raises(InvalidInput, match="fewer clusters than the one before"):
        build_levels(centers, np.ones(8, np.int64), np.ones(8), nums)


def test_a_level_loses_little_against_k_means_at_its_number():
    """100 directions without any structure above them, which is the hard case."""
    generator = np.random.default_rng(0)
    means = unit_rows(generator.standard_normal((100, 32)))
    rows = unit_rows(np.repeat(means, 40, axis=0) + 0.1 * generator.standard_normal((4000, 32)))
    fine = kmeans([rows], 400)
    levels = build_levels(fine.centers, fine.sizes, fine.cosines, (100, 10))
    for level, of in zip(levels, composed(levels), strict=True):
        own = level.centers[of[fine.assignment]].astype(np.float64)
        nested = float(np.einsum("nd,nd->n", rows, own).mean())
        assert level.objective == pytest.approx(nested, rel=1e-3)
        assert nested > 0.97 * kmeans([rows], len(level.centers)).objective[-1]


def test_the_table_of_levels_joins_with_labels(journey, tmp_path):
    made, plain = (
        call_mlcd("cluster", journey / "embeddings", tmp_path / name, *options, "--hold-out", 0)
        for name, options in (("made", ("--levels", "40,10,3")), ("plain", ("--clusters", 40)))
    )
    assert (made.returncode, plain.returncode) == (0, 0), made.stderr
    artifact = open_artifact(tmp_path / "made")
    finest = artifact.files["centers.npy"]
    assert finest == open_artifact(tmp_path / "plain").files["centers.npy"]
    table = pq.read_table(artifact.file("levels.parquet")).to_pydict()
    assert table["id"] == list(range(40))
    assert table["size"] == np.load(artifact.file("sizes.npy")).tolist()
    assert table["path"] == [
        f"{top}/{middle}/{center}"
        for top, middle, center in zip(table["of_3"], table["of_10"], table["id"], strict=True)
    ]
    labeled = call_mlcd(
        "label", journey / "embeddings", tmp_path / "labels", "--centers", tmp_path / "made"
    )
    assert labeled.returncode == 0, labeled.stderr
    for row in pq.read_table(tmp_path / "labels" / "part-00000.parquet").to_pylist():
        assert row["paths"] == [table["path"][center] for center in row["ids"]]
    assert np.load(artifact.file("level-10.npy")).shape[0] == 10
    facts = artifact.summary["levels"]
    assert [level["clusters"] for level in facts] == [10, 3]
    assert artifact.summary["objective"] > facts[0]["objective"] > facts[1]["objective"]
    both = call_mlcd(
        "cluster", journey / "embeddings", tmp_path / "x", "--levels", "4,2", "--clusters", 4
    )
    assert (both.returncode, "one of --clusters, --levels" in both.stderr) == (2, True)
