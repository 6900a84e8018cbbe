"""Clusters of bounded size: the bound holds, and nobody is nearer to a cluster that would take it."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.clustering import bounded_sizes
from mlcd.clustering.bounded_sizes import (
    TURNS,
    bound_sizes,
    bounded_assignment,
    checked_bound,
)
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.rows import ArrayRows, UnitRows
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.pipelines.cluster import ClusterOptions, cluster
from mlcd.progress import Reporter
from mlcd.types import unit_rows
from mlcd.world import World
from tests.conftest import call_mlcd


@st.composite
def crowded(draw):
    """Rows, some of them equal, most near the first center; a bound that just holds them, or is
    wide.
    """
    num, k = draw(st.integers(1, 40)), draw(st.integers(1, 7))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    centers = unit_rows(generator.standard_normal((k, 4)))
    rows = unit_rows(centers[0] + draw(st.floats(0.1, 3)) * generator.standard_normal((num, 4)))
    copied = generator.random(num) < draw(st.sampled_from([0, 0.3]))
    rows[copied] = rows[0]
    return rows, centers, -(-num // k) + draw(st.sampled_from([0, 0, 1, 5]))


def rows_of(rows):
    return UnitRows(ArrayRows([rows]))


def greedy(rows, centers, bound):
    """The definition: pairs by score descending, each row to the first center with room."""
    scores = (rows.astype(np.float64) @ centers.T.astype(np.float64)).astype(np.float32)
    own, sizes = np.full(len(rows), -1), np.zeros(len(centers), int)
    row, center = np.unravel_index(np.argsort(-scores, axis=None, kind="stable"), scores.shape)
    for i, k in zip(row.tolist(), center.tolist(), strict=True):
        if own[i] < 0 and sizes[k] < bound:
            own[i], sizes[k] = k, sizes[k] + 1
    return own


@pytest.mark.parametrize("pairs", [8, 1 << 20])
@settings(max_examples=60, deadline=None)
@given(made=crowded())
def test_the_assignment_is_the_one_that_takes_pairs_by_score(pairs, made):
    rows, centers, bound = made
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bounded_sizes, "_PAIRS", pairs)
        own = bounded_assignment(rows_of(rows), centers, bound)
    assert np.bincount(own, minlength=len(centers)).max() <= bound
    assert (own == greedy(rows, centers, bound)).all()


@settings(max_examples=25, deadline=None)
@given(crowded())
def test_clusters_keep_the_bound_and_their_objective_and_bytes(made):
    rows, centers, bound = made
    k = min(len(centers), len(np.unique(rows, axis=0)))
    bound = max(bound, -(-len(rows) // k))
    start = kmeans([rows], k)
    found, again = (bound_sizes(rows_of(rows), start, bound) for _ in range(2))
    assert found.sizes.sum() == len(rows)
    assert found.sizes.max() <= bound
    assert (np.bincount(found.assignment, minlength=k) == found.sizes).all()
    own = np.einsum("nd,nd->n", rows, found.centers[found.assignment])
    assert found.objective[-1] == pytest.approx(own.mean(), abs=1e-5)
    assert found.objective[:-1] == start.objective
    assert (bounded_assignment(rows_of(rows), found.centers, bound) == found.assignment).all()
    assert found.centers.tobytes() == again.centers.tobytes()


def test_a_bound_that_nobody_reaches_changes_nothing():
    rows = unit_rows(np.random.default_rng(0).standard_normal((300, 8)))
    start = kmeans([rows], 6)
    found = bound_sizes(rows_of(rows), start, 300)
    assert found.objective[-1] == pytest.approx(start.objective[-1], rel=1e-3)


def test_bounds_that_cannot_hold_all_rows_are_refused():
    assert checked_bound(100, 8, None) == 16
    assert checked_bound(100, 8, 13) == 13
    with pytest.raises(InvalidInput, match="at most 12 rows cannot contain 100") as refused:
        checked_bound(100, 8, 12)
    assert "allow 13 rows" in refused.value.remedy


def test_the_command_bounds_clusters_and_tells_what_that_costs(journey, tmp_path):
    out = tmp_path / "centers"
    options = ("--clusters", 12, "--balanced", "--hold-out", 0)
    made = call_mlcd("cluster", journey / "embeddings", out, *options)
    assert made.returncode == 0, made.stderr
    planned = json.loads(
        call_mlcd("cluster", journey / "embeddings", out, *options, "--plan", "--json").stdout
    )
    assert planned["passes"] == 26 + TURNS
    facts = json.loads((out / "manifest.json").read_text())["summary"]
    assert facts["bound"] == -(-facts["rows"] * 5 // (4 * 12))
    assert facts["largest"] <= facts["bound"]
    assert facts["objective"] <= facts["objective_unbounded"] + 1e-9
    assert f"without the limit of {facts['bound']} rows per cluster" in made.stdout
    members = pq.read_table(out / "members.parquet").to_pydict()
    assert members["key"] == EmbeddingsArtifact.open(journey / "embeddings").keys
    centers = Centers.open(out)
    assert np.bincount(members["cluster"], minlength=12).tolist() == centers.sizes.tolist()
    again = call_mlcd("cluster", journey / "embeddings", tmp_path / "again", *options)
    assert again.returncode == 0
    assert Centers.open(tmp_path / "again").digest == centers.digest
    for wrong, why in (
        (("--clusters", 12, "--balanced", "--largest", 2), "12 clusters of at most 2 rows cannot"),
        (("--clusters", 12, "--largest", 20), "--largest requires --balanced"),
    ):
        refused = call_mlcd("cluster", journey / "embeddings", tmp_path / "x", *wrong)
        assert (refused.returncode, why in refused.stderr) == (2, True), refused.stderr
    assert not (tmp_path / "x.partial").exists()


def test_several_processes_are_refused(journey, tmp_path):
    with pytest.raises(ConfigInvalid, match="need a single process"):
        cluster(
            EmbeddingsArtifact.open(journey / "embeddings"),
            tmp_path / "x",
            ClusterOptions(num_clusters=4, balanced=True),
            reporter=Reporter("silent"),
            world=World(0, 2),
        )
