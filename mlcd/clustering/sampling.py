"""Which members of clusters to keep: all but outliers, or as even a number of each as there is."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.randomness import hash_counters

_SMALL: Final = 1e-6  # spread of a cluster whose members are all the same


def outliers(
    assignment: NDArray[np.integer], distances: NDArray[np.float32], share: float
) -> NDArray[np.bool_]:
    """Returns which share of the rows lies farthest out in its own cluster, [N].

    A distance counts by how many of its cluster's spreads it is above the cluster's median. The
    spread is the median of the differences from that.
    """
    away = distances - _medians(assignment, distances)
    beyond = away / np.maximum(_medians(assignment, np.abs(away)), _SMALL)
    is_outlier = np.zeros(len(beyond), np.bool_)
    is_outlier[np.argsort(-beyond, kind="stable")[: round(share * len(beyond))]] = True
    return is_outlier


def balanced(
    levels: Sequence[NDArray[np.integer]], num: int, *, seed: int = 0
) -> NDArray[np.bool_]:
    """Returns which `num` rows to keep so that clusters are as even as they can be, [N].

    levels: the cluster of each row on each level, the finest first; the clusters of a level lie
    within those of the next. The coarsest clusters are as even as can be, then in each of them
    those of the next finer level, and so on (Vo et al., 2024). Clusters with fewer rows than the
    others get are kept whole. In the finest clusters rows are drawn by hash, and so are the
    clusters that get one more.
    """
    keys = hash_counters(seed, np.arange(len(levels[0])))
    # the turn of each row in its cluster: the first of all clusters come before the second of any
    turns = np.zeros(len(keys), np.int64)
    for clusters in levels:
        order = np.lexsort((keys, turns, clusters))
        of = clusters[order]
        turns[order] = np.arange(len(of)) - np.searchsorted(of, of)
    is_selected = np.zeros(len(keys), np.bool_)
    is_selected[np.lexsort((keys, turns))[:num]] = True
    return is_selected


def _medians(assignment: NDArray[np.integer], values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Returns the median of each row's cluster, [N]."""
    order = np.lexsort((values, assignment))
    ids, starts, counts = np.unique(assignment[order], return_index=True, return_counts=True)
    in_order = values[order].astype(np.float64)
    medians = (in_order[starts + (counts - 1) // 2] + in_order[starts + counts // 2]) / 2
    row_medians: NDArray[np.float64] = medians[np.searchsorted(ids, assignment)]
    return row_medians
