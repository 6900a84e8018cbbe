"""Spherical k-means: maximize J = (1/n) sum_i max_k <x_i, c_k> over unit centers.

Lloyd's iteration with exact assignment, sums and objective in float64, rows added in their global order: the
result depends on the rows, the seed and the number of clusters, and on nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.nearest import check_rows, nearest_centers
from mlcd.clustering.seeding import distinct_rows
from mlcd.errors import ConfigInvalid
from mlcd.randomness import uniform
from mlcd.types import Embeddings

_SPLIT_STEP: Final = 1e-3  # how far the halves of a split cluster move apart, relative to the unit center


@dataclass(frozen=True)
class KMeansResult:
    """centers: [K, D] unit rows. sizes: [K] int64 members of each center. assignment: [N] int32, of these centers.

    objective: J before each update, and of the final centers last. num_splits: empty clusters refilled.
    """

    centers: Embeddings
    sizes: NDArray[np.int64]
    assignment: NDArray[np.int32]
    objective: tuple[float, ...]
    num_splits: int


def kmeans(
    rows: Sequence[Embeddings],
    num_clusters: int,
    *,
    iterations: int = 25,
    seed: int = 0,
    tolerance: float = 1e-6,
    on_iteration: Callable[[float], None] = lambda _: None,
) -> KMeansResult:
    """Cluster unit rows, given in blocks of float32 [n, D].

    Stops after `iterations` updates or when J grows by less than `tolerance` of itself. Raises InvalidInput
    for rows that are not finite and for more clusters than distinct rows.
    """
    if num_clusters < 1 or iterations < 0:
        raise ConfigInvalid(f"{num_clusters} clusters and {iterations} iterations make no clustering")
    for block in rows:
        check_rows(block, "embeddings")
    centers = distinct_rows(rows, num_clusters, seed)
    assignment, objective = _assign(rows, centers)
    history, num_splits = [objective], 0
    for iteration in range(iterations):
        centers, repaired = _update(rows, assignment, centers, seed, iteration)
        num_splits += repaired
        assignment, objective = _assign(rows, centers)
        history.append(objective)
        on_iteration(objective)
        if not repaired and objective - history[-2] < tolerance * abs(objective):
            break
    sizes = np.bincount(assignment, minlength=num_clusters).astype(np.int64)
    return KMeansResult(centers, sizes, assignment, tuple(history), num_splits)


def _assign(rows: Sequence[Embeddings], centers: Embeddings) -> tuple[NDArray[np.int32], float]:
    found = [nearest_centers(block, centers, top=1) for block in rows]
    total = sum(float(neighbors.scores.sum(dtype=np.float64)) for neighbors in found)
    assignment = np.concatenate([neighbors.ids[:, 0] for neighbors in found])
    return assignment.astype(np.int32), total / len(assignment)


def _update(
    rows: Sequence[Embeddings], assignment: NDArray[np.int32], centers: Embeddings, seed: int, iteration: int
) -> tuple[Embeddings, int]:
    sums = np.zeros(centers.shape, dtype=np.float64)
    start = 0
    for block in rows:
        np.add.at(sums, assignment[start : start + len(block)], block)
        start += len(block)
    sizes = np.bincount(assignment, minlength=len(centers)).astype(np.float64)
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    means = np.divide(sums, norms, out=np.zeros_like(sums), where=norms > 0)
    return _split_largest(means, sizes, norms[:, 0] > 0, seed, iteration)


def _split_largest(
    means: NDArray[np.float64],
    sizes: NDArray[np.float64],
    usable: NDArray[np.bool_],
    seed: int,
    iteration: int,
) -> tuple[Embeddings, int]:
    """Refill every cluster that has no direction with one half of the currently largest cluster."""
    sizes = np.where(usable, sizes, 0.0)
    empty = np.flatnonzero(~usable)
    for cluster in empty:
        largest = int(np.argmax(sizes))
        step = _SPLIT_STEP * (uniform(seed, iteration, int(cluster), np.arange(means.shape[1])) - 0.5)
        for target, moved in ((cluster, means[largest] - step), (largest, means[largest] + step)):
            means[target] = moved / np.linalg.norm(moved)
        sizes[largest] = sizes[cluster] = sizes[largest] / 2
    return np.ascontiguousarray(means, dtype=np.float32), len(empty)
