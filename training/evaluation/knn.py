"""Weighted k-nearest-neighbor accuracy on held-out samples, and agreement of clusters with classes."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import nearest_centers
from mlcd.clustering.quality import normalized_mutual_information, purity
from mlcd.errors import InvalidInput
from mlcd.keys import held_out
from mlcd.types import Embeddings, unit_rows
from mlcd.world import World
from training.data.order import own_part
from training.evaluation.representations import LabeledRows
from training.evaluation.scores import Metric, score
from training.evaluation.splits import check_several_classes

TEMPERATURE: Final = 0.07  # Wu et al., CVPR 2018; unicom's evaluator
_UNIT: Final = 1e-5  # embeddings as served are unit to float32's rounding, and are taken as they are


def knn(
    samples: LabeledRows,
    *,
    neighbors: int,
    hold_out: float,
    metric: Metric = "accuracy",
    world: World | None = None,
) -> Iterator[tuple[str, float]]:
    """Yield the metric over held-out samples whose class is voted for by their neighbors among the others.

    hold_out 0: every sample by all others. The same in every process, whatever their number.
    """
    check_several_classes(samples.class_names)
    kept_out = held_out(samples.splits, hold_out)
    if hold_out == 0:
        kept_out = np.ones_like(kept_out)
    known = ~kept_out if hold_out > 0 else kept_out
    if not known.any() or not kept_out.any():
        raise InvalidInput(f"{len(kept_out)} images cannot be split into known and held-out ones")
    rows, classes = _directions(samples.rows), samples.classes
    world = world or World()
    queries = np.flatnonzero(kept_out)
    own = queries[own_part(len(queries), world.rank, world.size)]
    itself = own if hold_out == 0 else None
    voted = weighted_vote(rows[own], rows[known], classes[known], neighbors=neighbors, itself=itself)
    predicted = world.gather_rows(torch.from_numpy(voted)).numpy()
    yield f"knn_{metric.replace('-', '_')}", score(predicted, classes[kept_out], metric)
    yield "held_out_images", float(len(queries))


def weighted_vote(
    queries: Embeddings,
    known: Embeddings,
    classes: NDArray[np.integer],
    *,
    neighbors: int,
    itself: NDArray[np.integer] | None = None,
) -> NDArray[np.int64]:
    """The class with the largest sum of exp(cosine / 0.07) among the nearest; the lowest class wins a tie.

    itself: for each query its own row in `known`, which does not vote.
    """
    if len(queries) == 0:
        return np.empty(0, dtype=np.int64)
    found = nearest_centers(queries, known, top=min(neighbors + (itself is not None), len(known)))
    ids, weights = found.ids, np.exp((found.scores.astype(np.float64) - 1.0) / TEMPERATURE)
    if itself is not None:
        own = ids == itself[:, None]
        own[~own.any(axis=1), -1] = True  # more equals of lower ids than there are neighbors: the last one is too many
        weights[own] = 0.0
    votes = np.zeros((len(queries), int(classes.max()) + 1))
    rows = np.repeat(np.arange(len(queries)), ids.shape[1])
    np.add.at(votes, (rows, classes[ids].ravel()), weights.ravel())
    winners: NDArray[np.int64] = votes.argmax(axis=1)
    return winners


def clusters(samples: LabeledRows, *, seed: int) -> Iterator[tuple[str, float]]:
    """Yield purity and normalized mutual information of spherical k-means with as many clusters as classes."""
    num_classes = len(set(samples.class_names))
    assignment = kmeans([_directions(samples.rows)], num_classes, seed=seed).assignment
    yield "cluster_purity", purity(assignment, samples.class_names)
    yield "cluster_nmi", normalized_mutual_information(assignment, samples.class_names)


def _directions(rows: NDArray[np.float32]) -> Embeddings:
    norms = np.linalg.norm(rows, axis=1)
    return rows if np.abs(norms - 1).max() < _UNIT else unit_rows(rows)
