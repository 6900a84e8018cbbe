"""The members that speak for a cluster, and the words nearest to them.

Shapes: N members, K clusters, W words, D dimension.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.nearest import CenterScan
from mlcd.randomness import hash_counters
from mlcd.types import Embeddings

# members of all clusters together, and of one at least: 20,000 words for each take seconds
_ALL_MEMBERS: Final = 8192
_LEAST_MEMBERS: Final = 8
NEAREST_WORDS: Final = 5
_SHORTEST: Final = 1e-6  # a row closer to the mean than that has no direction


def draw_members(assignment: NDArray[np.integer], num_clusters: int) -> NDArray[np.int64]:
    """Returns the numbers of the members to ask, ascending; of a large cluster a sample by hash."""
    num_each = max(_LEAST_MEMBERS, _ALL_MEMBERS // max(1, num_clusters))
    numbers = np.arange(len(assignment))
    order = np.lexsort((hash_counters(numbers), assignment))
    of = assignment[order]
    rank = np.arange(len(of)) - np.searchsorted(of, of)
    return np.sort(order[rank < num_each])


def nearest_words(
    members_ND: Embeddings, words_WD: Embeddings, num: int = NEAREST_WORDS
) -> NDArray[np.int32]:
    """Returns the numbers of the words nearest to each member, [N, num], -1 where there are fewer.

    Images and texts lie in two cones of their own, so each side is compared after subtracting its
    mean. That also takes from a word what it has in common with all images.
    """
    nearest = CenterScan(_directions(words_WD)).nearest(_directions(members_ND), num)
    return nearest.ids.astype(np.int32)


def _directions(rows: Embeddings) -> Embeddings:
    """Returns the unit rows less their mean; those that are the mean become zero."""
    around: NDArray[np.float64] = rows - rows.mean(axis=0, dtype=np.float64)
    lengths = np.linalg.norm(around, axis=1, keepdims=True)
    around /= np.where(lengths > _SHORTEST, lengths, np.inf)
    return around.astype(np.float32)
