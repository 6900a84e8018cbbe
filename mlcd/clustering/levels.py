"""Builds levels of clusters bottom up: each coarser level groups the centers of the level below.

A center represents its members: its weight is the number of members times their mean inner product
with it, the length of their sum in its direction. Weighted spherical k-means over the centers then
maximizes the objective of the rows among all groupings that do not divide clusters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.nearest import nearest_centers
from mlcd.clustering.row_threads import limited_blas
from mlcd.errors import InvalidInput
from mlcd.randomness import uniform
from mlcd.types import Embeddings

_PASSES: Final = 50  # at most; a pass over centers is cheap compared with a pass over rows
_TOLERANCE: Final = 1e-6  # relative gain of the objective below which the passes end
_STARTS: Final = 4  # the best start is kept, because k-means ends in different optima
_SWEEPS: Final = 100  # of exchanges, at most
_CANCELED: Final = (
    1e-12  # share of the total length of sums below which a sum is only rounding error
)
_TOGETHER: Final = 1024  # centers summed at once: small enough for the cache


@dataclass(frozen=True)
class Level:
    """A level of K clusters over M finer ones.

    centers: [K, D] unit rows. weights: [K] float64, weights on the next level. groups: [M] int32,
    the cluster of each finer cluster; every cluster has at least one. objective: the mean
    inner product of rows and centers, estimated from the finer centers.
    """

    centers: Embeddings
    weights: NDArray[np.float64]
    groups: NDArray[np.int32]
    objective: float


def build_levels(
    centers: Embeddings,
    sizes: NDArray[np.int64],
    cosines: NDArray[np.float64],
    nums: Sequence[int],
    *,
    seed: int = 0,
) -> list[Level]:
    """Groups unit centers [M, D] into `nums[0]` clusters, these into `nums[1]`, and so on.

    sizes, cosines: number of members of each center, and their mean inner product with it; NaN for
    a center without members. Raises InvalidInput unless `nums` descends.
    """
    check_levels((len(centers), *nums))
    weights = np.where(sizes > 0, sizes * np.nan_to_num(cosines), 0.0)
    # a cluster without members, or whose members cancel out, still must join a group
    weights = np.maximum(weights, 1e-9 * weights.max(initial=1.0))
    num_rows, levels = int(sizes.sum()), []
    finest, finest_weights = centers, weights
    for depth, num in enumerate(nums):
        starts = (
            finest[_draw_rows(finest_weights, num, (seed, depth, start))]
            for start in range(_STARTS)
        )
        # starting from the finest centers, not yet grouped by other levels, gives better optima
        free = [
            _group(finest, finest_weights, start, num_rows, exchanges=False) for start in starts
        ]
        exchanged = [
            _group(centers, weights, level.centers, num_rows, exchanges=True) for level in free
        ]
        best = max(exchanged, key=lambda level: level.objective)
        levels.append(best)
        centers, weights = best.centers, best.weights
    return levels


def check_levels(nums: Sequence[int]) -> None:
    """Raises InvalidInput unless the numbers descend from level to level and are at least 1."""
    if nums[-1] < 1 or any(finer <= coarser for finer, coarser in pairwise(nums)):
        raise InvalidInput(
            "each level must have fewer clusters than the one before, and at least 1, got "
            f"{', '.join(map(str, nums))}",
            remedy="give the finest number of clusters first and then ever smaller ones",
        )


def composed(levels: list[Level]) -> list[NDArray[np.int32]]:
    """Returns, for every level, the cluster of each finest center, [M] each."""
    of_centers: list[NDArray[np.int32]] = []
    for level in levels:
        of_centers.append(level.groups if not of_centers else level.groups[of_centers[-1]])
    return of_centers


def _group(
    rows: Embeddings,
    weights: NDArray[np.float64],
    centers: Embeddings,
    num_rows: int,
    *,
    exchanges: bool,
) -> Level:
    """Groups weighted unit rows [M, D]. centers: initial centers."""
    num, last = len(centers), -np.inf
    for _ in range(_PASSES):
        groups, scores = _nearest(rows, centers)
        _fill_empty(groups, scores, weights, num)
        sums = _sums(rows, weights, groups, num)
        lengths = np.linalg.norm(sums, axis=1)
        centers = _directions(sums, centers)
        total = float(lengths.sum())
        if total - last < _TOLERANCE * total:
            break
        last = total
    if exchanges:
        _exchange(rows, weights, groups, sums)
        centers = _directions(sums, centers)
    products = np.einsum("kd,kd->k", sums, centers.astype(np.float64))
    return Level(centers, np.maximum(products, 0), groups, float(products.sum()) / num_rows)


def _directions(sums: NDArray[np.float64], before: Embeddings) -> Embeddings:
    lengths = np.linalg.norm(sums, axis=1)
    # rows that cancel out are no nearer to any other center
    usable = lengths > _CANCELED * lengths.sum()
    unit = sums / np.where(usable, lengths, 1.0)[:, None] + 0.0
    directions: Embeddings = np.where(usable[:, None], unit, before).astype(np.float32)
    return directions


def _exchange(
    rows: Embeddings,
    weights: NDArray[np.float64],
    groups: NDArray[np.int32],
    sums: NDArray[np.float64],
) -> None:
    """Moves single rows while the objective grows; updates `groups` and `sums` in place.

    Unlike a pass of k-means, a move accounts for its effect on both sums (Hartigan, 1975), which
    matters if groups have few rows. One sweep makes the best moves that share no group.
    """
    for _ in range(_SWEEPS):
        lengths = np.linalg.norm(sums, axis=1)
        members = np.bincount(groups, minlength=len(sums))
        to, gains = _best_moves(rows, weights, groups, sums, lengths)
        gains[members[groups] == 1] = -np.inf
        least = _TOLERANCE * lengths.sum() / len(rows)
        touched, gained = np.zeros(len(sums), np.bool_), 0.0
        for row in np.argsort(-gains, kind="stable").tolist():
            if gains[row] <= least or touched.all():
                break
            source, target = int(groups[row]), int(to[row])
            if touched[source] or touched[target]:
                continue
            touched[[source, target]] = True
            step = weights[row] * rows[row].astype(np.float64)
            sums[source] -= step
            sums[target] += step
            groups[row], gained = target, gained + gains[row]
        if gained < _TOLERANCE * lengths.sum():
            return


def _best_moves(
    rows: Embeddings,
    weights: NDArray[np.float64],
    groups: NDArray[np.int32],
    sums: NDArray[np.float64],
    lengths: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the best other group of each row, and the gain of the objective by the move."""
    to, gains = np.zeros(len(rows), np.int64), np.zeros(len(rows))
    of_sums = sums.astype(np.float32).T
    for start in range(0, len(rows), _TOGETHER):
        part = slice(start, start + _TOGETHER)
        w, own = weights[part, None], groups[part, None]
        with limited_blas():  # the order of summation depends on the number of threads
            products = (rows[part] @ of_sums).astype(np.float64) * (2 * w)
        leaving = np.take_along_axis(products, own.astype(np.int64), axis=1)
        own_lengths = lengths[own]
        lost = np.sqrt(np.maximum(own_lengths**2 - leaving + w**2, 0.0)) - own_lengths
        won = np.sqrt(np.maximum(lengths**2 + products + w**2, 0.0)) - lengths
        np.put_along_axis(won, own.astype(np.int64), -np.inf, axis=1)
        to[part] = won.argmax(axis=1)
        gains[part] = won.max(axis=1) + lost[:, 0]
    return to, gains


def _draw_rows(
    weights: NDArray[np.float64], num: int, counters: tuple[int, ...]
) -> NDArray[np.int64]:
    """Draws rows by their weight, without repetition (Efraimidis and Spirakis, 2006)."""
    drawn = uniform(*counters, np.arange(len(weights)))
    keys = -np.log1p(-drawn) / weights
    return np.sort(np.argsort(keys, kind="stable")[:num])


def _nearest(
    rows: Embeddings, centers: Embeddings
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    neighbors = nearest_centers(rows, centers, 1)
    return neighbors.ids[:, 0].astype(np.int32), neighbors.scores[:, 0].astype(np.float64)


def _fill_empty(
    groups: NDArray[np.int32],
    scores: NDArray[np.float64],
    weights: NDArray[np.float64],
    num: int,
) -> None:
    """Moves the row with the largest loss, from a group with other rows, to each empty group."""
    members = np.bincount(groups, minlength=num)
    empty = np.flatnonzero(members == 0)
    if not len(empty):
        return
    losses = iter(np.argsort(-weights * (1 - scores), kind="stable").tolist())
    for group in empty:
        row = next(row for row in losses if members[groups[row]] > 1)
        members[groups[row]] -= 1
        groups[row], members[group] = group, 1


def _sums(
    rows: Embeddings, weights: NDArray[np.float64], groups: NDArray[np.int32], num: int
) -> NDArray[np.float64]:
    """Returns the weighted sum of each group's rows, [K, D], added in the order of the rows."""
    sums = np.zeros((num, rows.shape[1]))
    order = np.argsort(groups, kind="stable")
    for start in range(0, len(rows), _TOGETHER):
        part = order[start : start + _TOGETHER]
        ids = groups[part]
        starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
        sums[ids[starts]] += np.add.reduceat(rows[part] * weights[part, None], starts, axis=0)
    return sums
