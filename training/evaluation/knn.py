"""Weighted k-nearest-neighbor accuracy on test samples, and agreement of clusters with classes."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import nearest_centers
from mlcd.clustering.quality import normalized_mutual_information, purity
from mlcd.errors import InvalidInput
from mlcd.training.data.order import own_part
from mlcd.training.evaluation.gathering import gather_answers
from mlcd.training.evaluation.scores import Answers, Metric, answers
from mlcd.training.evaluation.splits import LabeledRows, check_several_classes
from mlcd.types import Embeddings, unit_rows
from mlcd.world import World

TEMPERATURE: Final = 0.07  # Wu et al., CVPR 2018; unicom's evaluator
# Rows with norms within this tolerance of 1 count as normalized, up to float32's rounding.
_UNIT_TOLERANCE: Final = 1e-5


def knn(
    samples: LabeledRows,
    *,
    neighbors: int,
    hold_out: float,
    metric: Metric = "accuracy",
    world: World | None = None,
) -> Iterator[tuple[str, float]]:
    """Yields the metric of `knn_answers`, and the number of tested samples."""
    answers_of_knn = knn_answers(samples, neighbors=neighbors, hold_out=hold_out, world=world)
    yield f"knn_{metric.replace('-', '_')}", answers_of_knn.score(metric)
    yield "test_images", float(len(answers_of_knn.classes))


def knn_answers(
    samples: LabeledRows, *, neighbors: int, hold_out: float, world: World | None = None
) -> Answers:
    """Classifies the test samples by a weighted vote of their nearest known samples.

    hold_out: share of each class to test on if the samples lack a split; 0 tests every sample with
    all others voting. All processes return the same result, for any number of processes.
    """
    check_several_classes(samples.class_names)
    leave_one_out = hold_out == 0 and samples.own_split is None
    split = samples.split(hold_out)
    test, voting = (np.ones_like(split.test),) * 2 if leave_one_out else (split.test, split.known)
    if not voting.any() or not test.any():
        raise InvalidInput(
            f"k-NN requires known images and test images, but of {len(test)} images one part is"
            " empty"
        )
    rows, classes = _normalize_rows(samples.rows), samples.classes
    world = world or World()
    queries = np.flatnonzero(test)
    own_queries = queries[own_part(len(queries), world.rank, world.size)]
    self_rows = own_queries if leave_one_out else None
    votes = count_votes(
        rows[own_queries],
        rows[voting],
        classes[voting],
        num_classes=int(classes.max()) + 1,
        neighbors=neighbors,
        self_rows=self_rows,
    )
    return gather_answers(answers(votes, classes[own_queries]), world)


def count_votes(
    queries: Embeddings,
    voters: Embeddings,
    classes: NDArray[np.integer],
    *,
    num_classes: int,
    neighbors: int,
    self_rows: NDArray[np.integer] | None = None,
) -> NDArray[np.float64]:
    """Returns votes [N, C]: for each class the sum of exp((cosine - 1) / 0.07) over the neighbors.

    self_rows: row of each query in `voters`, which does not vote; None if no query is a voter.
    """
    votes = np.zeros((len(queries), num_classes))
    if len(queries) == 0:
        return votes
    nearest = nearest_centers(
        queries, voters, top=min(neighbors + (self_rows is not None), len(voters))
    )
    ids, weights = (
        nearest.ids,
        np.exp((nearest.scores.astype(np.float64) - 1.0) / TEMPERATURE),
    )
    if self_rows is not None:
        is_excluded = ids == self_rows[:, None]
        # If equal rows with lower ids crowd out the query itself, drop the last neighbor instead.
        is_excluded[~is_excluded.any(axis=1), -1] = True
        weights[is_excluded] = 0.0
    rows = np.repeat(np.arange(len(queries)), ids.shape[1])
    np.add.at(votes, (rows, classes[ids].ravel()), weights.ravel())
    return votes


def clusters(samples: LabeledRows, *, seed: int) -> Iterator[tuple[str, float]]:
    """Yields purity and normalized mutual information of spherical k-means clusters and classes.

    The number of clusters is the number of classes. If the samples have a split, the known samples
    are clustered and the tested samples are assigned to their nearest center.
    """
    rows, split = _normalize_rows(samples.rows), samples.own_split
    clustered = np.ones(len(rows), np.bool_) if split is None else split.known
    num_classes = len(np.unique(samples.classes[clustered]))
    clustering = kmeans([rows[clustered]], num_classes, seed=seed)
    assignment: NDArray[np.integer[Any]] = clustering.assignment
    class_names = samples.class_names
    if split is not None:
        assignment = nearest_centers(rows[split.test], clustering.centers, top=1).ids[:, 0]
        class_names = [class_names[row] for row in np.flatnonzero(split.test).tolist()]
    yield "cluster_purity", purity(assignment, class_names)
    yield "cluster_nmi", normalized_mutual_information(assignment, class_names)
    if split is not None:
        yield "test_images", float(split.test.sum())


def _normalize_rows(rows: NDArray[np.float32]) -> Embeddings:
    norms = np.linalg.norm(rows, axis=1)
    return rows if np.abs(norms - 1).max() < _UNIT_TOLERANCE else unit_rows(rows)
