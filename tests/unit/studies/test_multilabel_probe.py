"""The multi-label probe against scikit-learn."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.multiclass import OneVsRestClassifier

from mlcd.errors import InvalidInput
from mlcd.keys import split_positions
from studies.losses.multilabel_probe import GRID, best_c, multilabel_probe
from training.evaluation.scores import average_precision
from training.evaluation.splits import split_samples


@pytest.fixture
def problem():
    """Rows, tags of four attributes that depend on them by and by, splits."""
    generator = np.random.default_rng(3)
    rows = generator.normal(size=(400, 12)).astype(np.float32)
    logits = rows @ generator.normal(size=(12, 4)) + generator.normal(size=(400, 4)) * 2 - 1
    splits = split_positions([f"{number}" for number in range(400)], [None] * 400)
    return rows, logits > 0, splits


def test_map_is_that_of_one_versus_rest_in_scikit_learn(problem):
    rows, tags, splits = problem
    found = dict(multilabel_probe(rows, tags, splits, hold_out=0.2))
    split = split_samples(splits, 0.2)
    known = split.train | split.validation
    model = OneVsRestClassifier(LogisticRegression(C=found["c"], tol=1e-10, max_iter=10_000))
    model.fit(rows[known].astype(np.float64), tags[known].astype(int))
    expected = average_precision_score(
        tags[split.test], model.decision_function(rows[split.test]), average="macro"
    )
    assert found["multilabel_map"] == pytest.approx(expected, abs=1e-6)
    assert (found["attributes"], found["test_images"]) == (4, split.test.sum())


@pytest.mark.parametrize("levels", [3, 1000])
def test_average_precision_is_scikit_learns_also_with_ties(levels):
    generator = np.random.default_rng(levels)
    ranking, positive = (
        generator.integers(0, levels, 200).astype(float),
        generator.random(200) < 0.2,
    )
    assert average_precision(ranking, positive) == pytest.approx(
        average_precision_score(positive, ranking)
    )


def test_features_that_are_not_finite_are_refused():
    rows = np.ones((8, 2), dtype=np.float32)
    rows[5, 1] = np.nan
    with pytest.raises(InvalidInput, match="row 5 of the features"):
        list(
            multilabel_probe(
                rows, np.ones((8, 1), dtype=np.bool_), np.linspace(0, 1, 8), hold_out=0.2
            )
        )


def test_search_takes_the_best_of_all_and_the_smallest_of_equals():
    scores = dict(zip(GRID, (0.3, 0.2, 0.1, 0.1, 0.5, 0.5, 0.4), strict=True))
    assert best_c(scores.__getitem__) == GRID[4]


@pytest.mark.parametrize("value", [True, False])
def test_an_attribute_that_tells_nothing_apart_is_refused(problem, value):
    rows, tags, splits = problem
    tags[:, 2] = value
    with pytest.raises(InvalidInput, match="attribute 2 of 4") as refusal:
        dict(multilabel_probe(rows, tags, splits, hold_out=0.2))
    assert refusal.value.remedy
