import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from mlcd.clustering.quality import (
    adjusted_rand_index,
    conflict_rate,
    imbalance,
    near_duplicates,
    normalized_mutual_information,
    purity,
    size_histogram,
)
from mlcd.types import unit_rows


def test_quality_equals_scikit_learn():
    generator = np.random.default_rng(0)
    assignment = generator.integers(0, 7, 300)
    classes = [str(c) for c in generator.integers(0, 4, 300)]
    classes[:150] = [str(c % 4) for c in assignment[:150]]
    expected = normalized_mutual_info_score(classes, assignment)
    assert normalized_mutual_information(assignment, classes) == pytest.approx(expected, abs=1e-12)
    assert adjusted_rand_index(assignment, classes) == pytest.approx(
        adjusted_rand_score(classes, assignment)
    )
    assert purity(np.array([0, 0, 0, 1, 1]), ["a", "a", "b", "b", "b"]) == 0.8
    assert normalized_mutual_information(np.zeros(4, int), ["a"] * 4) == 1.0
    assert adjusted_rand_index(np.zeros(4, int), ["a"] * 4) == 1.0
    assert imbalance(np.array([5, 5])) == 1.0
    assert imbalance(np.array([10, 0])) == 2.0


def test_conflicts_are_the_pairs_of_one_cluster_and_two_classes():
    # Cluster 0: 3 pairs, two of them of two classes; cluster 1: one pair, of one class.
    assert conflict_rate(np.array([0, 0, 0, 1, 1]), ["a", "a", "b", "b", "b"]) == pytest.approx(
        2 / 4
    )
    assert conflict_rate(np.array([0, 1]), ["a", "b"]) == 0.0


def test_sizes_are_binned_by_powers_of_two():
    assert size_histogram(np.array([0, 1, 1, 2, 3, 4, 9])) == [
        (0, 1),
        (1, 2),
        (2, 2),
        (4, 1),
        (8, 1),
    ]


def test_near_duplicates_are_counted_and_equal_centers_too():
    centers = unit_rows(np.eye(6) + 1e-9)
    centers[5] = centers[0]
    centers[4] = unit_rows(centers[3:4] + np.float32(0.01) * np.eye(6, dtype=np.float32)[:1])[0]
    found = near_duplicates(centers)
    assert found["asked"] == 6
    assert found["above_0.999"] == 4
    assert found["quantiles"]["1"] == pytest.approx(1.0, abs=1e-6)
    assert near_duplicates(np.repeat(centers[:1], 3, axis=0))["above_0.999"] == 3
