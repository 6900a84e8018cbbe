"""Weighted k-nearest-neighbor accuracy on held-out samples, and agreement of clusters with classes."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import nearest_centers
from mlcd.clustering.quality import normalized_mutual_information, purity
from mlcd.errors import InvalidInput
from mlcd.keys import held_out
from mlcd.types import Embeddings
from training.evaluation.representations import Representation

TEMPERATURE = 0.07  # Wu et al., CVPR 2018; unicom's evaluator


def knn(representation: Representation, *, neighbors: int, hold_out: float) -> Iterator[tuple[str, float]]:
    """Yield ("knn_accuracy", share of held-out samples whose class wins the vote of the others' neighbors)."""
    kept_out = held_out(representation.splits, hold_out)
    if kept_out.all() or not kept_out.any():
        raise InvalidInput(f"{len(kept_out)} images cannot be split into known and held-out ones")
    _, classes = np.unique(representation.class_names, return_inverse=True)
    rows = representation.embeddings
    predicted = weighted_vote(rows[kept_out], rows[~kept_out], classes[~kept_out], neighbors=neighbors)
    yield "knn_accuracy", float((predicted == classes[kept_out]).mean())
    yield "held_out_images", float(kept_out.sum())


def weighted_vote(
    queries: Embeddings, known: Embeddings, classes: NDArray[np.integer], *, neighbors: int
) -> NDArray[np.int64]:
    """The class with the largest sum of exp(cosine / 0.07) among the nearest; the lowest class wins a tie."""
    found = nearest_centers(queries, known, top=min(neighbors, len(known)))
    weights = np.exp((found.scores.astype(np.float64) - 1.0) / TEMPERATURE)
    votes = np.zeros((len(queries), int(classes.max()) + 1))
    rows = np.repeat(np.arange(len(queries)), found.ids.shape[1])
    np.add.at(votes, (rows, classes[found.ids].ravel()), weights.ravel())
    winners: NDArray[np.int64] = votes.argmax(axis=1)
    return winners


def clusters(representation: Representation, *, seed: int) -> Iterator[tuple[str, float]]:
    """Yield purity and normalized mutual information of spherical k-means with as many clusters as classes."""
    num_classes = len(set(representation.class_names))
    assignment = kmeans([representation.embeddings], num_classes, seed=seed).assignment
    yield "cluster_purity", purity(assignment, representation.class_names)
    yield "cluster_nmi", normalized_mutual_information(assignment, representation.class_names)
