"""New clusters beside old ones that stay: what lies beyond its cluster's own quantile is clustered.

Distances are 1 - cosine. An old center never moves.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.sums import ClusterSums
from mlcd.types import Embeddings

_LEAST_MEMBERS: Final = 10  # with fewer members a cluster takes the quantile of all rows
_PASSES: Final = 10
_STARTS: Final = 4  # the best of so many is kept: of few clusters one start may miss one


def nearest(rows: Embeddings, centers: Embeddings) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Returns the nearest center of each row and the distance to it, [N] each."""
    found = CenterScan(centers, matmul="numpy").nearest(rows, 1)
    return found.ids[:, 0].astype(np.int32), 1 - found.scores[:, 0]


def own_quantiles(
    assignment: NDArray[np.integer], distances: NDArray[np.float32], num: int, share: float
) -> NDArray[np.float32]:
    """Returns the distance from each of `num` centers within which that share of its members
    lies.
    """
    quantiles = np.full(num, np.quantile(distances, share), np.float32)
    order = np.argsort(assignment, kind="stable")
    bounds = np.searchsorted(assignment[order], np.arange(num + 1))
    for center in np.flatnonzero(np.diff(bounds) >= _LEAST_MEMBERS):
        members = order[bounds[center] : bounds[center + 1]]
        quantiles[center] = np.quantile(distances[members], share)
    return quantiles


def new_centers(
    rows: Embeddings,
    centers: Embeddings,
    quantiles: NDArray[np.float32],
    *,
    typical: int,
    num: int | None,
    least: int,
    seed: int,
) -> tuple[Embeddings, NDArray[np.bool_]]:
    """Returns centers [M, D] of new clusters, and which rows were held aside, [N].

    Held aside is what lies beyond the quantile of its center. It is divided into `num` clusters, or
    into as many as have `typical` rows each. A cluster whose center lies within an old one's
    quantile is a part of that one, and no new one; nor is one of fewer than `least` rows. The new
    centers are then moved to the means of all rows that are nearest to them.
    """
    own, distances = nearest(rows, centers)
    aside = distances > quantiles[own]
    held = rows[aside]
    num = num or max(1, round(len(held) / max(1, typical)))
    num = min(num, len(np.unique(held, axis=0)))
    nothing = centers[:0]
    if not num:
        return nothing, aside
    starts = (kmeans([held], num, seed=seed + start) for start in range(_STARTS))
    found = max(starts, key=lambda result: result.objective[-1])
    near, away = nearest(found.centers, centers)
    new = found.centers[(away > quantiles[near]) & (found.sizes >= least)]
    for _ in range(_PASSES):
        if not len(new):
            return nothing, aside
        joined, _ = nearest(rows, np.concatenate([centers, new]))
        theirs = joined >= len(centers)
        totals = ClusterSums.zeros(len(new), rows.shape[1])
        totals.add(rows[theirs], joined[theirs] - len(centers))
        means, lengths = totals.directions()
        kept = (totals.sizes >= least) & (lengths > 0)
        if kept.all() and (means == new).all():
            break
        new = means[kept]
    return new, aside


def matched(
    before: NDArray[np.integer], since: NDArray[np.integer], nums: tuple[int, int]
) -> NDArray[np.int64]:
    """Returns the old cluster of each new one, [K new], so that most rows stay; -1 for none.

    before, since: the clusters of the same rows, [N]. nums: how many there are of each. Clusters
    match that share the most rows in all, of the pairs that share more than half of the rows of
    either.
    """
    shared = np.zeros(nums, np.int64)
    np.add.at(shared, (before, since), 1)
    either = np.minimum(shared.sum(axis=1)[:, None], shared.sum(axis=0)[None, :])
    counted = np.where(2 * shared > either, shared, 0)
    old, new = linear_sum_assignment(counted, maximize=True)
    found = np.full(nums[1], -1, np.int64)
    real = counted[old, new] > 0
    found[new[real]] = old[real]
    return found
