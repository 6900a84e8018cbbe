import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.given_names import GIVEN_NAMES, change_names
from mlcd.artifacts.manifest import Request, open_artifact
from mlcd.clustering.nearest import nearest_centers
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.errors import ConfigInvalid, Conflict
from mlcd.service.inference.lookup import Lookup, QueryNovelty
from mlcd.types import unit_rows


def random_centers(num, seed=0, mean=None, audit_rows=None):
    vectors = unit_rows(np.random.default_rng(seed).standard_normal((num, 16)))
    return Centers(vectors, np.ones(num, np.int64), "f" * 64, mean=mean, audit_rows=audit_rows)


@pytest.fixture
def indexed(tmp_path):
    made = []

    def make(rows):
        path = tmp_path / str(len(made))
        made.append(
            Collection.create(path, fingerprint="f" * 64, dimension=rows.shape[1], background=False)
        )
        made[-1].add([Item(str(i), row) for i, row in enumerate(rows)])
        return made[-1]

    yield make
    for collection in made:
        collection.close()


def near(centers, num, seed=1):
    generator = np.random.default_rng(seed)
    chosen = centers.vectors[generator.integers(0, len(centers.vectors), num)]
    return unit_rows(chosen + 0.3 * generator.standard_normal(chosen.shape).astype(np.float32))


def test_exact_is_the_exact_scan_after_the_mean_is_taken_away():
    mean = np.full(16, 0.05, np.float32)
    centers = random_centers(50, mean=mean)
    rows = near(centers, 7)
    found = Lookup(centers).nearest(rows, 99)
    assert (found.ids == nearest_centers(unit_rows(rows - mean), centers.vectors, 50).ids).all()
    assert Lookup(centers).modes == ["exact"]


def test_a_threshold_of_one_labels_copies(indexed):
    centers = random_centers(1500)
    lookup = Lookup(centers)
    lookup.approximate([indexed(near(centers, 1000))])
    for rows in (centers.vectors[:200], unit_rows(centers.vectors[:200] * np.float32(3))):
        for mode in lookup.modes:
            found = lookup.nearest(rows, 3, 1.0, mode=mode)
            assert found.ids[:, 0].tolist() == list(range(200))
            assert (found.scores[:, 0] == 1).all()
            assert (found.ids[:, 1:] == -1).all()
    similarities = lookup.nearest(near(centers, 50), 3).scores
    for row, similarity in zip(near(centers, 50), similarities[:, 1].tolist(), strict=True):
        assert (lookup.nearest(row[None], 3, similarity).ids >= 0).tolist() == [[True, True, False]]


def test_the_audit_of_the_approximation_is_true_of_other_rows(indexed):
    centers = random_centers(1500)
    lookup = Lookup(centers)
    lookup.approximate([indexed(near(centers, 2500))])
    assert lookup.modes == ["exact", "approximate"]
    audit = lookup.approximation.audit
    assert audit["low"] >= 0.98
    assert audit["low"] <= audit["recall"] <= audit["high"]
    assert (audit["rows"], audit["top"], audit["source"]) == (1250, 8, "collections")
    others = near(centers, 1000, seed=2)
    exact = lookup.nearest(others, 8).ids
    found = lookup.nearest(others, 8, mode="approximate").ids
    recall = np.mean([len(set(a) & set(b)) / 8 for a, b in zip(exact, found, strict=True)])
    assert abs(recall - audit["recall"]) < 0.01


def test_the_audit_is_made_on_rows_shipped_with_the_centers_where_there_are_some(indexed):
    rows = near(random_centers(1500), 2100)
    centers = random_centers(1500, audit_rows=rows.astype(np.float16))
    lookup = Lookup(centers)
    lookup.approximate([indexed(near(centers, 1000))])
    audit = lookup.approximation.audit
    assert (audit["rows"], audit["source"]) == (1050, "centers")
    probes = audit["probes"]
    exact = lookup.scan.nearest(rows[1::2], 8).ids
    found = lookup.approximation.scan.nearest(rows[1::2], 8, probes=probes).ids
    recall = np.mean([len(set(a) & set(b)) / 8 for a, b in zip(exact, found, strict=True)])
    assert recall == pytest.approx(audit["recall"], abs=1e-3)  # they are in half precision


def test_what_cannot_be_approximated_or_audited_is_refused(indexed):
    few = near(random_centers(9), 999).astype(np.float16)
    for centers in (random_centers(1500), random_centers(1500, audit_rows=few)):
        with pytest.raises(
            ConfigInvalid, match=r"on 1000 rows or more.* 0 indexed images .*leave MLCD_APPROXIMATE"
        ):
            Lookup(centers).approximate([])
    with pytest.raises(ConfigInvalid, match=r"1000 rows or more.* 999 indexed images"):
        Lookup(random_centers(1500)).approximate([indexed(near(random_centers(9), 999))])
    with pytest.raises(
        ConfigInvalid, match=r"require at least 1000 centers, got 900: leave MLCD_APPROXIMATE out"
    ):
        Lookup(random_centers(900)).approximate([indexed(near(random_centers(9), 1000))])


@pytest.fixture
def published(tmp_path):
    with Draft(tmp_path / "c", Request("centers", fingerprint="f" * 64)) as draft:
        random_centers(3).write(draft)
        return draft.publish()


def make_read_only(folder):
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)


@contextmanager
def without_privileges():
    """Root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_centers_beside_which_nothing_can_be_written_keep_their_names(
    tmp_path, monkeypatch, published
):
    lookup = Lookup(random_centers(3), published)
    assert lookup.rename(1, "cat").folded == ["", "cat", ""]
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # pytest's own folder above is closed to others
    lookup = Lookup(random_centers(3), open_artifact(Path("c"), "centers"))
    make_read_only(Path("c"))
    with without_privileges(), pytest.raises(Conflict, match="cannot be written"):
        lookup.rename(1, "dog")
    assert lookup.names.names == (None, "cat", None)


def test_names_given_to_read_only_centers_are_kept_in_the_state(tmp_path, monkeypatch, published):
    change_names(published, lambda given: given.set_by_hand({0: "wolf", 2: "fox"}))
    before = (published.path / GIVEN_NAMES).read_bytes()
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # pytest's own folder above is closed to others
    (state := Path("state")).mkdir(mode=0o777)
    state.chmod(0o777)
    make_read_only(Path("c"))
    artifact = open_artifact(Path("c"), "centers")
    with without_privileges():
        lookup, other = (Lookup(random_centers(3), artifact, state) for _ in range(2))
        assert lookup.rename(1, "cat").names == ("wolf", "cat", "fox")
        assert lookup.rename(0, None).version == 3
        other.follow_names()
        assert other.centers.names == other.names.names == (None, "cat", "fox")
    assert Lookup(random_centers(3), artifact, state).names.names == (None, "cat", "fox")
    assert (Path("c") / GIVEN_NAMES).read_bytes() == before
    Path("c").chmod(0o755)  # as `mlcd name` changes them
    change_names(artifact, lambda given: given.set_by_hand({0: "dog", 1: "lynx", 2: "owl"}))
    other.follow_names()
    assert other.names.names == ("dog", "cat", "owl")  # a name taken away may come anew


def test_other_centers_have_names_of_their_own_in_the_state(tmp_path, published):
    with Draft(tmp_path / "d", Request("centers", fingerprint="e" * 64)) as draft:
        random_centers(2).write(draft)
        others = draft.publish()
    Lookup(random_centers(3), published, tmp_path).rename(1, "cat")
    assert Lookup(random_centers(2), others, tmp_path).names.names == (None, None)
    Lookup(random_centers(2), others, tmp_path).rename(1, "owl")
    assert Lookup(random_centers(3), published, tmp_path).names.names == (None, "cat", None)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 1}', b"\xff"])
def test_damaged_names_leave_the_others_and_refuse_changes(tmp_path, published, content):
    change_names(published, lambda given: given.set_by_hand({0: "wolf"}))
    Lookup(random_centers(3), published, tmp_path).rename(1, "cat")
    for damaged, names in (
        (tmp_path / "names" / f"{published.digest}.json", ("wolf", None, None)),
        (published.path / GIVEN_NAMES, (None, "cat", None)),
    ):
        whole = damaged.read_bytes()
        damaged.write_bytes(content)
        lookup = Lookup(random_centers(3), published, tmp_path)
        assert lookup.names.names == lookup.centers.names == names
        assert lookup.damaged_names is not None
        with pytest.raises(Conflict, match=rf"{damaged.name} is damaged"):
            lookup.rename(2, "fox")
        assert damaged.read_bytes() == content
        damaged.write_bytes(whole)
        assert lookup.rename(2, None).names == ("wolf", "cat", None)


def test_images_beyond_the_quantile_of_their_own_center_are_novel():
    vectors = np.eye(3, 8, dtype=np.float32)
    quantiles = np.array([0.1, 0.5, 0.1], np.float32)
    centers = Centers(vectors, np.ones(3, np.int64), "f" * 64, quantiles=quantiles)
    lookup = Lookup(centers)
    far = [0.7, 0, 0, 0, 0.714, 0, 0, 0]
    rows = unit_rows(np.array([vectors[0], far, np.roll(far, 1), vectors[2]], np.float32))
    assert lookup.remember(rows, lookup.nearest(rows, 2)) == 1
    # what a threshold leaves out has a nearest center all the same
    assert lookup.remember(rows, lookup.nearest(rows, 2, threshold=0.9)) == 1
    images, novel = lookup.recent.by_center()
    assert (images.tolist(), novel.tolist()) == ([4, 2, 2], [2, 0, 0])
    assert (lookup.novelty_distances == quantiles).all()
    assert Lookup(random_centers(3)).remember(near(random_centers(3), 2), None) is None


def test_of_many_images_the_latest_count():
    recent = QueryNovelty(np.array([0.1, 0.1], np.float32))
    assert recent.add(np.zeros(9_000, np.int32), np.zeros(9_000, np.float32)) == 9_000
    assert recent.add(np.ones(4_000, np.int32), np.ones(4_000, np.float32)) == 0
    images, novel = recent.by_center()
    assert (images.tolist(), novel.tolist()) == ([6_000, 4_000], [6_000, 0])
    assert recent.add(np.zeros(25_000, np.int32), np.ones(25_000, np.float32)) == 0
    assert recent.by_center()[0].tolist() == [10_000, 0]
    assert recent.add(np.zeros(0, np.int32), np.zeros(0, np.float32)) == 0


def test_names_follow_their_file_and_stay_while_it_is_damaged(tmp_path):
    with Draft(tmp_path / "c", Request("centers", fingerprint="f" * 64)) as draft:
        random_centers(3).write(draft)
        artifact = draft.publish()
    lookup = Lookup(Centers.read(artifact), artifact)
    for name in ("one", "another"):
        change_names(artifact, lambda given, name=name: given.set_by_hand({1: name}))
        lookup.follow_names()
        assert lookup.centers.name(1) == name
    (tmp_path / "c" / GIVEN_NAMES).write_text("{")
    lookup.follow_names()
    assert lookup.names.names == lookup.centers.names == (None, "another", None)
    (tmp_path / "c" / GIVEN_NAMES).unlink()
    lookup.follow_names()
    assert lookup.names.names == (None, None, None)


def test_names_stay_while_the_centers_are_removed_and_others_take_their_place(tmp_path):
    def write(num):
        with Draft(tmp_path / "c", Request("centers", fingerprint="f" * 64)) as draft:
            random_centers(num).write(draft)
            return draft.publish()

    artifact = write(3)
    lookup = Lookup(Centers.read(artifact), artifact)
    change_names(artifact, lambda given: given.set_by_hand({1: "one"}))
    lookup.follow_names()
    shutil.rmtree(artifact.path)
    lookup.follow_names()
    write(2)
    lookup.follow_names()
    assert lookup.names.names == (None, "one", None)
