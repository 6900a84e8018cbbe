"""Adds new clusters and keeps the old ones: clusters the rows beyond the quantile of their cluster.

Distances are 1 - cosine. Old centers never move.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import nearest_centers, nearest_with_distances
from mlcd.clustering.sums import ClusterSums
from mlcd.types import Embeddings

_LEAST_MEMBERS: Final = 10  # a cluster with fewer members gets the quantile of all rows
_PASSES: Final = 10
_ROUNDS: Final = 6
_FEW: Final = (
    0.05  # share of old centers that may be closer together than new centers may be to them
)
_ALONE: Final = 1e-6  # a shorter sum of the remaining members is only rounding error
_STARTS: Final = 4  # the best start is kept: one start may miss one of few clusters


def own_quantiles(
    assignment: NDArray[np.integer],
    distances: NDArray[np.float32],
    num: int,
    share: float,
    lengths: NDArray[np.float64] | None = None,
) -> NDArray[np.float32]:
    """Returns the distance from each of `num` centers within which a `share` of its members lies.

    A member's distance is measured from the mean of the other members, as for a later row.
    lengths: lengths of the sums of all members, if the rows are a sample.
    """
    if lengths is None:
        cosines = 1 - distances.astype(np.float64)
        lengths = np.bincount(assignment, weights=cosines, minlength=num).astype(np.float64)
    left_out = _without_itself(distances, lengths[assignment])
    quantiles = np.full(num, np.quantile(left_out, share), np.float32)
    order = np.argsort(assignment, kind="stable")
    bounds = np.searchsorted(assignment[order], np.arange(num + 1))
    for center in np.flatnonzero(np.diff(bounds) >= _LEAST_MEMBERS):
        members = order[bounds[center] : bounds[center + 1]]
        quantiles[center] = np.quantile(left_out[members], share)
    return quantiles


def _without_itself(
    distances: NDArray[np.float32], length: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the distance of each row from the mean of the other members of its cluster.

    length: length of the sum of its cluster's members. A center c has the direction of its members'
    sum s, so |s| is the sum of their cosines. Without x the sum is s - x, of length
    sqrt(|s|^2 - 2 |s| c.x + 1), and x.(s - x) is |s| c.x - 1.
    """
    cosines = 1 - distances.astype(np.float64)
    rest_lengths = np.sqrt(np.maximum(length**2 - 2 * length * cosines + 1, 0))
    alone = rest_lengths < _ALONE
    without: NDArray[np.float64] = 1 - np.where(alone, 0, length * cosines - 1) / np.where(
        alone, 1, rest_lengths
    )
    return without


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
    """Returns centers [M, D] of new clusters, and a mask [N] of the rows set aside.

    Rows beyond the quantile of their center are set aside and divided into `num` clusters, or into
    clusters of `typical` rows. Then rows nearer to a new center than to an old one join them, and
    all are divided again, until the number of clusters no longer changes.
    """
    own, distances = nearest_with_distances(rows, centers)
    aside = distances > quantiles[own]
    spacing = _spacing(centers)
    chosen, new, last = aside, centers[:0], 0
    for _ in range(_ROUNDS):
        num_parts = num or max(1, round(int(chosen.sum()) / max(1, typical)))
        num_parts = min(num_parts, int(chosen.sum()) // least)
        if num_parts == last:
            break
        divided = _split_rows(rows[chosen], num_parts, seed)
        new = _move_centers(rows, centers, _apart(divided, centers, spacing), least)
        if not len(new):
            break
        last = num_parts
        chosen = aside | (
            nearest_with_distances(rows, np.concatenate([centers, new]))[0] >= len(centers)
        )
    return _move_centers(rows, centers, _apart(new, centers, spacing), least), aside


def _spacing(centers: Embeddings) -> float:
    """Returns the `_FEW` quantile of the distances of old centers to their nearest neighbors."""
    if len(centers) < 2:
        return 0.0
    scores = nearest_centers(centers, centers, 2).scores[:, 1]
    return float(np.quantile(1 - scores, _FEW))


def _split_rows(rows: Embeddings, num: int, seed: int) -> Embeddings:
    num = min(num, len(np.unique(rows, axis=0)))
    starts = (kmeans([rows], num, seed=seed + start) for start in range(_STARTS))
    return max(starts, key=lambda result: result.objective[-1]).centers


def _apart(new: Embeddings, centers: Embeddings, spacing: float) -> Embeddings:
    """Returns the new centers at least `spacing` away from all old centers.

    A nearer center belongs to a part of an old cluster.
    """
    return new[nearest_with_distances(new, centers)[1] >= spacing] if len(new) else new


def _move_centers(rows: Embeddings, centers: Embeddings, new: Embeddings, least: int) -> Embeddings:
    """Moves the new centers to the means of the rows nearest to them; old centers stay.

    New centers with fewer than `least` rows are dropped.
    """
    for _ in range(_PASSES):
        if not len(new):
            break
        joined, _ = nearest_with_distances(rows, np.concatenate([centers, new]))
        theirs = joined >= len(centers)
        totals = ClusterSums.zeros(len(new), rows.shape[1])
        totals.add(rows[theirs], joined[theirs] - len(centers))
        means, lengths = totals.directions()
        is_large = (totals.sizes >= least) & (lengths > 0)
        if is_large.all() and (means == new).all():
            break
        new = means[is_large]
    return new


def matched(
    before: NDArray[np.integer], since: NDArray[np.integer], nums: tuple[int, int]
) -> NDArray[np.int64]:
    """Matches each new cluster to an old cluster, [K new]; -1 for none.

    before, since: old and new cluster of the same rows, [N]. nums: numbers of old and new clusters.
    The matching maximizes the number of shared rows, among pairs that share more than half of the
    rows of either cluster.
    """
    old_of = np.full(nums[1], -1, np.int64)
    if not len(before):
        return old_of
    num_old = nums[0]
    sizes = np.concatenate(
        [np.bincount(before, minlength=num_old), np.bincount(since, minlength=nums[1])]
    )
    pairs, shared = np.unique(before.astype(np.int64) * nums[1] + since, return_counts=True)
    old, new = np.divmod(pairs, nums[1])
    new += num_old
    is_old_smaller = sizes[old] <= sizes[new]
    smaller, larger = np.where(is_old_smaller, (old, new), (new, old))
    is_pair = 2 * shared > sizes[smaller]
    partners = _match_trees(sizes, smaller[is_pair], larger[is_pair], shared[is_pair])
    for cluster, partner in partners:
        old_of[max(cluster, partner) - num_old] = min(cluster, partner)
    return old_of


def _match_trees(
    sizes: NDArray[np.int64],
    smaller: NDArray[np.int64],
    larger: NDArray[np.int64],
    shared: NDArray[np.int64],
) -> list[tuple[int, int]]:
    """Returns the pairs that share the most rows in total, each cluster in at most one pair.

    More than half of a cluster's rows are in one other cluster only, so each cluster is `smaller`
    once at most, and the pairs are trees that hang from their largest clusters: from the leaves up,
    `gains` counts how many more rows a tree keeps if its root is matched with a child.
    """
    parents = dict(
        zip(smaller.tolist(), zip(larger.tolist(), shared.tolist(), strict=True), strict=True)
    )
    upwards = np.argsort(sizes, kind="stable").tolist()  # ties go to the old clusters
    gains, partners = [0] * len(sizes), [-1] * len(sizes)
    for cluster in upwards:
        parent, rows = parents.get(cluster, (cluster, 0))
        if rows - gains[cluster] > gains[parent]:
            gains[parent], partners[parent] = rows - gains[cluster], cluster
    pairs, used_partners = [], set()
    for cluster in reversed(upwards):
        if partners[cluster] >= 0 and cluster not in used_partners:
            pairs.append((cluster, partners[cluster]))
            used_partners.add(partners[cluster])
    return pairs
