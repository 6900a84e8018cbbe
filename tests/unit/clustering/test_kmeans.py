import importlib

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from mlcd.artifact import Draft, Request
from mlcd.clustering.centers import Centers, majority_names
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import nearest_centers
from mlcd.clustering.quality import imbalance, normalized_mutual_information, purity
from mlcd.errors import ArtifactInvalid, InvalidInput
from mlcd.types import unit_rows


def planted(num_clusters=8, per_cluster=40, dimension=16, noise=0.15):
    generator = np.random.default_rng(0)
    means = unit_rows(generator.standard_normal((num_clusters, dimension)))
    rows = np.repeat(means, per_cluster, axis=0) + noise * generator.standard_normal(
        (num_clusters * per_cluster, dimension)
    )
    return unit_rows(rows), np.repeat(np.arange(num_clusters), per_cluster)


def test_it_finds_planted_clusters():
    rows, truth = planted()
    best = max((kmeans([rows], 8, seed=seed) for seed in range(8)), key=lambda result: result.objective[-1])
    assert adjusted_rand_score(truth, best.assignment) > 0.99


def test_the_objective_never_falls_and_is_that_of_the_final_centers():
    rows, _ = planted(noise=0.6)
    result = kmeans([rows], 12, tolerance=0.0)
    assert all(later >= earlier - 1e-7 for earlier, later in zip(result.objective, result.objective[1:], strict=False))
    exact = (rows.astype(np.float64) @ result.centers.astype(np.float64).T).max(axis=1).mean()
    assert result.objective[-1] == pytest.approx(exact, abs=1e-7)


def test_one_iteration_equals_the_definition():
    rows, _ = planted(noise=0.6)
    start = kmeans([rows], 5, iterations=0)
    expected = np.stack([rows[start.assignment == k].astype(np.float64).sum(axis=0) for k in range(5)])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert kmeans([rows], 5, iterations=1).centers == pytest.approx(expected, abs=1e-6)


def test_centers_are_unit_sizes_add_up_and_labels_are_the_nearest():
    rows, _ = planted(noise=0.6)
    result = kmeans([rows], 10)
    assert np.linalg.norm(result.centers, axis=1) == pytest.approx(np.ones(10), abs=1e-6)
    assert result.sizes.sum() == len(rows)
    assert (nearest_centers(rows, result.centers, 1).ids[:, 0] == result.assignment).all()


def test_blocks_do_not_change_a_bit_and_seeds_do():
    rows, _ = planted(noise=0.6)
    whole = kmeans([rows], 10, seed=3)
    blocks = kmeans([rows[:7], rows[7:100], rows[100:]], 10, seed=3)
    assert whole.centers.tobytes() == blocks.centers.tobytes()
    assert whole.objective == blocks.objective
    assert whole.centers.tobytes() != kmeans([rows], 10, seed=4).centers.tobytes()


def test_more_clusters_than_distinct_rows_are_refused():
    rows = np.repeat(unit_rows(np.eye(3)), 5, axis=0)
    with pytest.raises(InvalidInput, match="at most 3 clusters"):
        kmeans([rows], 4)
    assert sorted(kmeans([rows], 3).sizes) == [5, 5, 5]


def test_rows_that_are_not_finite_are_refused():
    rows, _ = planted()
    rows[11] = np.inf
    with pytest.raises(InvalidInput, match="row 11"):
        kmeans([rows], 2)


def test_a_cluster_without_direction_takes_half_of_the_largest():
    module = importlib.import_module("mlcd.clustering.kmeans")

    rows = unit_rows(np.array([[1.0, 0], [-1, 0], [0, 1], [0.01, 1], [0.02, 1]]))
    # Opposite rows start in one cluster: its mean has no direction.
    start = unit_rows(np.array([[1.0, 1e-9], [0, 1]]))
    assignment = np.array([0, 0, 1, 1, 1], dtype=np.int32)
    centers, repaired = module._update([rows], assignment, start, 0, 0)
    assert repaired == 1
    assert np.linalg.norm(centers, axis=1) == pytest.approx([1, 1], abs=1e-6)
    # Both halves lie beside the mean of the larger cluster, and apart from each other.
    assert (centers @ unit_rows(np.array([[0.01, 1]]))[0]).min() > 0.999
    assert not np.array_equal(centers[0], centers[1])


def test_quality_equals_scikit_learn():
    generator = np.random.default_rng(0)
    assignment = generator.integers(0, 7, 300)
    classes = [str(c) for c in generator.integers(0, 4, 300)]
    expected = normalized_mutual_info_score(classes, assignment)
    assert normalized_mutual_information(assignment, classes) == pytest.approx(expected, abs=1e-12)
    assert purity(np.array([0, 0, 0, 1, 1]), ["a", "a", "b", "b", "b"]) == 0.8
    assert normalized_mutual_information(np.zeros(4, int), ["a"] * 4) == 1.0
    assert imbalance(np.array([5, 5])) == 1.0
    assert imbalance(np.array([10, 0])) == 2.0


def test_the_centers_artifact_round_trips(tmp_path):
    rows, _ = planted()
    result = kmeans([rows], 4)
    mean = rows.mean(axis=0)
    original = Centers(result.centers, result.sizes, "f" * 64, ("a", None, "ü", "d"), mean)
    with Draft(tmp_path / "centers", Request("centers", fingerprint="f" * 64)) as draft:
        original.write(draft)
        draft.publish()
    read = Centers.open(tmp_path / "centers")
    assert read.vectors.tobytes() == original.vectors.tobytes()
    assert read.names == original.names
    assert read.align(rows) == pytest.approx(unit_rows(rows - mean), abs=1e-6)
    with pytest.raises(ArtifactInvalid, match="not consistent"):
        Centers(result.centers, result.sizes[:-1], "f" * 64)


def test_names_are_the_majority_of_known_classes():
    assignment = np.array([0, 0, 0, 1, 1, 2])
    assert majority_names(assignment, ["b", "a", "b", "z", "y", None], 4) == ("b", "y", None, None)
