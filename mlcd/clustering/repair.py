"""Replaces centers that a clustering cannot use: empty, duplicate or without a direction."""

import hashlib
import heapq
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.sums import ClusterSums
from mlcd.randomness import uniform
from mlcd.types import Embeddings

# distance that the new half of a split cluster moves, relative to the unit center
_SPLIT_STEP: Final = 1e-3
_ALIKE: Final = 1e-7  # 1 - |mean| of a cluster of equal rows, due to rounding


def next_centers(
    totals: ClusterSums, centers: Embeddings, seed: int, iteration: int
) -> tuple[Embeddings, int]:
    """Returns ([K, D] float32 unit means, number of centers replaced).

    Of equal centers all but the first are dropped, and the first gets their rows. Dropped centers,
    and centers of clusters that are empty or lack a direction, move next to the center of the
    largest cluster, whose size then counts half. The split center stays, so a repair never lowers
    the objective. If no cluster has a direction, the present `centers` stay: rows that cancel out
    are not nearer to any other center.
    """
    means, lengths = totals.directions()
    sizes = np.where(lengths > 0, totals.sizes, 0)
    if not sizes.any():
        return centers, 0
    for duplicate, first in duplicates(means, lengths > 0):
        sizes[first] += sizes[duplicate]
        sizes[duplicate] = 0
    unusable = np.flatnonzero(sizes == 0)
    if len(unusable):
        _split_largest(means, sizes, lengths < (1 - _ALIKE) * totals.sizes, (seed, iteration))
    return means, len(unusable)


def duplicates(centers: Embeddings, usable: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Returns (center, first equal center) for every usable center that equals an earlier one."""
    first_of_content: dict[bytes, int] = {}
    pairs = []
    for center in np.flatnonzero(usable):
        content = hashlib.blake2b(centers[center].data, digest_size=16).digest()
        if (earlier := first_of_content.setdefault(content, int(center))) != center:
            pairs.append((int(center), earlier))
    return pairs


def _split_largest(
    means: Embeddings,
    sizes: NDArray[np.int64],
    spread: NDArray[np.bool_],
    counters: tuple[int, int],
) -> None:
    # Splitting a cluster of equal rows would leave one half empty.
    divisible = (sizes > 1) & spread
    donors = divisible if divisible.any() else sizes > 0
    heap = [(-float(sizes[center]), int(center)) for center in np.flatnonzero(donors)]
    heapq.heapify(heap)
    for center in np.flatnonzero(sizes == 0):
        size, largest = heap[0]
        step = _SPLIT_STEP * (uniform(*counters, int(center), np.arange(means.shape[1])) - 0.5)
        moved = means[largest] + step
        means[center] = moved / np.linalg.norm(moved)
        heapq.heapreplace(heap, (size / 2, largest))
        heapq.heappush(heap, (size / 2, int(center)))
