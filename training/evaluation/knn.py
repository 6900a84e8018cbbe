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
# Served embeddings are unit to float32's rounding; within this tolerance rows are used as they are.
_UNIT: Final = 1e-5


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
    """Returns the classes of a weighted vote of neighbors among the known samples.

    hold_out: the share that is tested on if the samples have no split; with 0, every sample is
    tested by all others. The result is the same in every process, whatever their number.
    """
    check_several_classes(samples.class_names)
    leave_one_out = hold_out == 0 and samples.own_split is None
    split = samples.split(hold_out)
    test, voting = (np.ones_like(split.test),) * 2 if leave_one_out else (split.test, split.known)
    if not voting.any() or not test.any():
        raise InvalidInput(
            f"{len(test)} images cannot be split into known ones and ones to test on"
        )
    rows, classes = _directions(samples.rows), samples.classes
    world = world or World()
    queries = np.flatnonzero(test)
    own = queries[own_part(len(queries), world.rank, world.size)]
    itself = own if leave_one_out else None
    votes = count_votes(
        rows[own],
        rows[voting],
        classes[voting],
        num_classes=int(classes.max()) + 1,
        neighbors=neighbors,
        itself=itself,
    )
    return gather_answers(answers(votes, classes[own]), world)


def count_votes(
    queries: Embeddings,
    voters: Embeddings,
    classes: NDArray[np.integer],
    *,
    num_classes: int,
    neighbors: int,
    itself: NDArray[np.integer] | None = None,
) -> NDArray[np.float64]:
    """Returns [N, C]: the sum of exp(cosine / 0.07) of each class among the nearest.

    itself: the row of each query in `voters`, which does not vote.
    """
    votes = np.zeros((len(queries), num_classes))
    if len(queries) == 0:
        return votes
    neighbors_found = nearest_centers(
        queries, voters, top=min(neighbors + (itself is not None), len(voters))
    )
    ids, weights = (
        neighbors_found.ids,
        np.exp((neighbors_found.scores.astype(np.float64) - 1.0) / TEMPERATURE),
    )
    if itself is not None:
        own = ids == itself[:, None]
        # If more equal rows with lower ids exist than there are neighbors, the query itself is not
        # found and  the last neighbor is one too many.
        own[~own.any(axis=1), -1] = True
        weights[own] = 0.0
    rows = np.repeat(np.arange(len(queries)), ids.shape[1])
    np.add.at(votes, (rows, classes[ids].ravel()), weights.ravel())
    return votes


def clusters(samples: LabeledRows, *, seed: int) -> Iterator[tuple[str, float]]:
    """Yields purity and normalized mutual information of spherical k-means clusters and classes.

    There are as many clusters as classes. If the samples have a split, the known ones are clustered
    and the tested ones take their nearest center.
    """
    rows, split = _directions(samples.rows), samples.own_split
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


def _directions(rows: NDArray[np.float32]) -> Embeddings:
    norms = np.linalg.norm(rows, axis=1)
    return rows if np.abs(norms - 1).max() < _UNIT else unit_rows(rows)
