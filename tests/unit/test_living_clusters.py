"""`mlcd clusters`: ids stay while digits arrive that the clusters have never seen."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.living_centers import JOURNAL, LivingCenters
from mlcd.artifacts.manifest import open_artifact
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import nearest_with_distances
from mlcd.clustering.novelty import own_quantiles
from mlcd.clustering.quality import purity
from mlcd.pipelines.verify import verify
from mlcd.types import unit_rows
from tests.conftest import call_mlcd, succeed

NEW = ("7", "8", "9")


def made(*arguments):
    result = succeed(*arguments, "--json")
    return json.loads(result.stdout.splitlines()[-1])


def refused(*arguments):
    result = call_mlcd(*arguments)
    assert result.returncode == 2, result.stdout
    return result.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory, digits):
    """Embeddings of the digits 0 to 6 and of the others; centers of the first, updated."""
    place = tmp_path_factory.mktemp("living")
    for folder in digits.iterdir():
        shutil.copytree(folder, place / ("new" if folder.name in NEW else "old") / folder.name)
    for name in ("old", "new"):
        made("embed", place / name, place / f"{name}-rows", "--model", "hog")
    made("cluster", place / "old-rows", place / "centers", "--levels", "14,5,2", "--hold-out", 0)
    (place / "names").write_text('{"0": "zero", "13": "last"}')
    made("name", place / "centers", "--set", place / "names")
    made("clusters", "update", place / "centers", place / "new-rows", place / "updated")
    return place


def rows_of(place, name):
    opened = EmbeddingsArtifact.open(place / f"{name}-rows")
    return unit_rows(opened.load()), opened.class_names


def test_old_images_keep_their_ids_and_new_classes_get_their_own(place):
    before, since = Centers.open(place / "centers"), Centers.open(place / "updated")
    num = len(before.vectors)
    assert (since.vectors[:num] == before.vectors).all()
    assert len(since.vectors) > num
    (old, _), (new, classes) = rows_of(place, "old"), rows_of(place, "new")
    own, now = (
        nearest_with_distances(old, before.vectors)[0],
        nearest_with_distances(old, since.vectors)[0],
    )
    assert (own == now).mean() >= 0.9
    found, _ = nearest_with_distances(new, since.vectors)
    assert (found >= num).mean() > 0.8
    scratch = kmeans([np.concatenate([old, new])], len(since.vectors)).assignment[len(old) :]
    assert purity(found, classes) > purity(scratch, classes) - 0.03
    assert since.sizes.sum() == len(old) + len(new)
    facts = open_artifact(place / "updated").summary
    assert facts["new"] == len(since.vectors) - num
    assert facts["in_new"] == (found >= num).sum() == since.sizes[num:].sum()
    assert since.names[:num] == before.names
    assert since.examples.of_center(0) == before.examples.of_center(0)
    keys = EmbeddingsArtifact.open(place / "new-rows").keys
    for center in range(num, len(since.vectors)):
        first = since.examples.of_center(center)[0]
        members = np.flatnonzero(found == center)
        best = members[(new[members] @ since.vectors[center]).argmax()]
        assert first.key == keys[best]
    assert all(finding.checked for finding in verify(place / "updated"))


def test_centers_that_stay_keep_their_path_and_new_ones_join_the_nearest_group(place):
    before, since = (Centers.open(place / name) for name in ("centers", "updated"))
    num = len(before.paths)
    assert since.paths[:num] == before.paths
    groups = np.load(place / "updated" / "level-5.npy")
    coarser = {path.split("/")[1]: path.split("/")[0] for path in before.paths}
    for center in range(num, len(since.paths)):
        group = str(int((groups @ since.vectors[center]).argmax()))
        assert since.paths[center] == f"{coarser[group]}/{group}/{center}"


def test_rows_like_the_old_ones_make_no_cluster(place, tmp_path):
    facts = made("clusters", "update", place / "updated", place / "old-rows", tmp_path / "again")
    assert facts["new"] <= 1
    assert LivingCenters.read(open_artifact(tmp_path / "again")).journal.steps[-1]["added"]


def test_merged_split_and_replayed(place, tmp_path):
    merged, split = tmp_path / "merged", tmp_path / "split"
    made("clusters", "merge", place / "updated", 5, 2, 9, merged)
    state = LivingCenters.read(open_artifact(merged))
    assert state.clusters[[2, 5, 9]].tolist() == [2, 2, 2]
    num = len(state.clusters)
    assert len(np.unique(state.clusters)) == num - 2
    made("label", place / "new-rows", tmp_path / "labels", "--centers", merged)
    paths = Centers.open(merged).paths
    for row in pq.read_table(tmp_path / "labels" / "part-00000.parquet").to_pylist():
        assert row["clusters"] == state.clusters[row["ids"]].tolist()
        assert row["paths"] == [paths[center] for center in row["ids"]]
    assert (state.centers.vectors == Centers.open(place / "updated").vectors).all()
    made("clusters", "split", merged, 3, split, "--members", place / "old-rows")
    after = LivingCenters.read(open_artifact(split))
    assert (len(after.clusters), after.clusters[num]) == (num + 1, num)
    moved = (after.centers.vectors[:num] != state.centers.vectors).any(axis=1)
    assert np.flatnonzero(moved).tolist() == [3]
    assert after.centers.sizes[[3, num]].sum() == state.centers.sizes[3]
    assert after.centers.sizes[3] >= after.centers.sizes[num] > 0
    assert after.centers.name(13) == "last"
    old, _ = rows_of(place, "old")
    keys = EmbeddingsArtifact.open(place / "old-rows").keys
    found, _ = nearest_with_distances(old, after.centers.vectors)
    for center in (3, num):
        examples = [example.key for example in after.centers.examples.of_center(center)]
        assert set(examples) <= {keys[row] for row in np.flatnonzero(found == center)}
    given = [option for name in ("old", "new") for option in ("--using", place / f"{name}-rows")]
    again = made("clusters", "replay", split, place / "centers", tmp_path / "again", *given)
    assert again["digest"] == open_artifact(split).digest
    assert not list(tmp_path.glob(".again*"))
    assert (tmp_path / "again" / JOURNAL).read_bytes() == (split / JOURNAL).read_bytes()
    message = refused("clusters", "replay", split, place / "centers", tmp_path / "x", *given[:2])
    assert "used the artifact of digest" in message
    message = refused("clusters", "replay", split, merged, tmp_path / "x", *given)
    assert "starts from other centers" in message
    assert "needs the journal" in refused(
        "clusters", "replay", place / "centers", place / "centers", tmp_path / "x"
    )


@pytest.fixture(scope="module")
def aligned(place, digits):
    """All digits, clustered from scratch, with the ids of the updated centers."""
    made("embed", digits, place / "all-rows", "--model", "hog")
    made("cluster", place / "all-rows", place / "scratch", "--clusters", 24, "--hold-out", 0)
    facts = made("clusters", "align", place / "updated", place / "scratch", place / "aligned")
    return facts, LivingCenters.read(open_artifact(place / "aligned"))


def test_a_clustering_from_scratch_takes_the_ids_of_clusters_that_have_its_members(
    place, aligned, tmp_path
):
    facts, state = aligned
    before, scratch = Centers.open(place / "updated"), Centers.open(place / "scratch")
    rows = unit_rows(EmbeddingsArtifact.open(place / "all-rows").load())
    ids, now = (
        nearest_with_distances(rows, before.vectors)[0],
        nearest_with_distances(rows, scratch.vectors)[0],
    )
    alive = np.unique(state.clusters)
    assert len(alive) == 24 == facts["kept"] + facts["new"]
    order = [int((scratch.vectors @ state.centers.vectors[each]).argmax()) for each in alive]
    assert sorted(order) == list(range(24))  # the same centers under other numbers
    assert (state.centers.vectors[alive] == scratch.vectors[order]).all()
    assert state.centers.sizes[alive].tolist() == scratch.sizes[order].tolist()
    id_of = dict(zip(order, alive.tolist(), strict=True))
    since = np.array([id_of[center] for center in now.tolist()])
    assert facts["stay"] == pytest.approx((ids == since).mean())
    for each in alive[alive < len(before.vectors)]:
        both = ((ids == each) & (since == each)).sum()
        assert 2 * both > min((ids == each).sum(), (since == each).sum())
    for gone in np.flatnonzero(state.clusters != np.arange(len(state.clusters))):
        went = since[ids == gone]
        assert (went == state.clusters[gone]).sum() == np.bincount(went).max()
    using = [place / f"{name}-rows" for name in ("old", "new", "all")] + [place / "scratch"]
    options = [option for path in using for option in ("--using", path)]
    again = made(
        "clusters", "replay", place / "aligned", place / "centers", tmp_path / "again", *options
    )
    assert again["digest"] == open_artifact(place / "aligned").digest


def test_labels_of_an_earlier_state_are_translated_and_the_disagreement_is_measured(
    place, aligned, tmp_path
):
    made("label", place / "old-rows", tmp_path / "labels", "--centers", place / "centers")
    (old, _), first = rows_of(place, "old"), Centers.open(place / "centers")
    ids, _ = nearest_with_distances(old, first.vectors)
    for name in ("centers", "updated", "aligned"):
        state = LivingCenters.read(open_artifact(place / name))
        facts = made("clusters", "translate", tmp_path / "labels", place / name, tmp_path / name)
        table = pq.read_table(tmp_path / name / "translated.parquet").to_pydict()
        assert table["key"] == EmbeddingsArtifact.open(place / "old-rows").keys
        assert table["before"] == ids.tolist()
        assert table["cluster"] == state.clusters[ids].tolist()
        now = state.clusters[nearest_with_distances(old, state.centers.vectors)[0]]
        assert table["now"] == now.tolist()
        assert facts["disagreement"] == (now != state.clusters[ids]).mean()
        assert (facts["disagreement"] == 0) == (name == "centers")
    assert facts["disagreement"] < 0.5
    message = refused(
        "clusters", "translate", tmp_path / "labels", place / "scratch", tmp_path / "x"
    )
    assert "must be labels by" in message


def test_a_changed_journal_does_not_replay(place, tmp_path):
    copy = shutil.copytree(place / "updated", tmp_path / "copy")
    (copy / JOURNAL).write_text((copy / JOURNAL).read_text().replace("0.95", "0.94"))
    assert "differs from its manifest" in refused(
        "clusters", "replay", copy, place / "centers", tmp_path / "x"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("merge", "{centers}", 1, "{out}"), "needs at least two different ids"),
        (("merge", "{centers}", 1, 1, "{out}"), "needs at least two different ids"),
        (
            ("merge", "{centers}", 1, 14, "{out}"),
            "must be in 0 to 13, got 14",
        ),
        (("split", "{centers}", 99, "{out}"), "must be in 0 to 13, got 99"),
        (("update", "{new-rows}", "{new-rows}", "{out}"), "not centers"),
        (("update", "{centers}", "{new-rows}", "{out}", "--quantile", 1), "not in the range"),
    ],
)
def test_what_cannot_be_changed_is_refused(place, tmp_path, arguments, message):
    names = {"{out}": tmp_path / "out"} | {
        f"{{{name}}}": place / name for name in ("centers", "new-rows")
    }
    assert message in refused("clusters", *(names.get(each, each) for each in arguments))
    assert not (tmp_path / "out").exists()


def test_embeddings_of_another_model_are_refused(place, tmp_path):
    made("embed", place / "new" / "7", tmp_path / "rows", "--model", "pixels")
    message = refused("clusters", "update", place / "centers", tmp_path / "rows", tmp_path / "x")
    assert "must be of the same model" in message


def test_a_quantile_is_that_of_distances_from_the_other_members():
    generator = np.random.default_rng(0)
    rows = unit_rows(generator.standard_normal((23, 5)) + 3 * np.eye(1, 5))
    own = np.repeat([0, 2], [20, 3])
    sums = [rows[own == 0].sum(axis=0), -rows[0], rows[own == 2].sum(axis=0)]
    centers = unit_rows(np.stack(sums))
    distances = 1 - np.einsum("nd,nd->n", rows, centers[own])
    others = unit_rows(np.stack([sums[of] - row for of, row in zip(own, rows, strict=True)]))
    left_out = 1 - np.einsum("nd,nd->n", rows, others)
    quantiles = own_quantiles(own, distances, 3, 0.5)
    expected = np.median(left_out[:20]), np.median(left_out), np.median(left_out)
    assert quantiles == pytest.approx(expected, abs=1e-5)  # few members: the quantile of all rows
    alone = own_quantiles(np.array([0, 1]), np.zeros(2, np.float32), 2, 0.5)
    assert alone.tolist() == [1, 1]
