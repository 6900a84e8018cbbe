"""Selects members of clusters: all but outliers, or numbers as equal as possible per cluster."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.randomness import hash_counters

_SMALL: Final = 1e-6  # least spread, for a cluster of equal members


def outliers(
    assignment: NDArray[np.integer], distances: NDArray[np.float32], share: float
) -> NDArray[np.bool_]:
    """Returns a mask [N] of the `share` of rows that lie farthest out in their clusters.

    Rows are compared by (distance - median) / spread. Both are medians of the cluster: of the
    distances, and of their absolute differences from the median.
    """
    away = distances - _medians(assignment, distances)
    beyond = away / np.maximum(_medians(assignment, np.abs(away)), _SMALL)
    is_outlier = np.zeros(len(beyond), np.bool_)
    is_outlier[np.argsort(-beyond, kind="stable")[: round(share * len(beyond))]] = True
    return is_outlier


def balanced(
    levels: Sequence[NDArray[np.integer]], num: int, *, seed: int = 0
) -> NDArray[np.bool_]:
    """Returns a mask [N] of `num` rows to keep so that clusters are as balanced as possible.

    levels: cluster of each row on each level, finest first; each cluster lies within one cluster of
    the next level. The coarsest clusters are balanced first, then the next finer clusters within
    each, and so on (Vo et al., 2024). Clusters smaller than their share are kept whole. A hash
    selects rows in the finest clusters, and the clusters that get one row more.
    """
    keys = hash_counters(seed, np.arange(len(levels[0])))
    # rank of each row in its cluster: the first rows of all clusters precede all second rows
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
