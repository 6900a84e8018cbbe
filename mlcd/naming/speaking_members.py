"""Samples the members of each cluster, and finds the words nearest to them.

Shapes: N members, K clusters, W words, D dimension.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.nearest import CenterScan
from mlcd.randomness import hash_counters
from mlcd.types import Embeddings

# Sampled members of all clusters together; comparing them with 20,000 words takes seconds.
_ALL_MEMBERS: Final = 8192
_LEAST_MEMBERS: Final = 8  # per cluster
NEAREST_WORDS: Final = 5
_LEAST_DISTANCE: Final = 1e-6  # from the mean; a nearer row has no direction


def draw_members(assignment: NDArray[np.integer], num_clusters: int) -> NDArray[np.int64]:
    """Returns the indices of the sampled members, ascending: all of a small cluster, those with the
    lowest hashes of a large one.
    """
    num_each = max(_LEAST_MEMBERS, _ALL_MEMBERS // max(1, num_clusters))
    members = np.arange(len(assignment))
    order = np.lexsort((hash_counters(members), assignment))
    clusters = assignment[order]
    rank = np.arange(len(clusters)) - np.searchsorted(clusters, clusters)
    return np.sort(order[rank < num_each])


def nearest_words(
    members_ND: Embeddings, words_WD: Embeddings, num: int = NEAREST_WORDS
) -> NDArray[np.int32]:
    """Returns the indices of the `num` words nearest to each member, [N, num], padded with -1.

    Embeddings of images and of texts lie in two separate cones, so the mean of each is subtracted
    before they are compared.
    """
    nearest = CenterScan(_directions(words_WD)).nearest(_directions(members_ND), num)
    return nearest.ids.astype(np.int32)


def _directions(rows: Embeddings) -> Embeddings:
    """Returns rows - mean, scaled to norm 1; a row equal to the mean becomes zeros."""
    centered: NDArray[np.float64] = rows - rows.mean(axis=0, dtype=np.float64)
    lengths = np.linalg.norm(centered, axis=1, keepdims=True)
    centered /= np.where(lengths > _LEAST_DISTANCE, lengths, np.inf)
    return centered.astype(np.float32)
