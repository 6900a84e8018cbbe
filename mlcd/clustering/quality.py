"""Measures of clusters: their agreement with known classes, their balance and their tightness."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.rows import lowest_hashed
from mlcd.types import Embeddings

_NEAR: Final = (0.99, 0.999)  # cosines above which two centers are counted as near duplicates
# centers that `near_duplicates` samples: all pairs of a million would take days
_MAX_SAMPLED_CENTERS: Final = 16_384
_QUANTILES: Final = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)


def purity(assignment: NDArray[np.integer], class_names: Sequence[str]) -> float:
    """Returns the share of samples whose class is the majority class of their cluster."""
    table = _Contingency.of(assignment, class_names)
    largest = np.zeros(len(table.by_cluster), dtype=np.int64)
    np.maximum.at(largest, table.clusters, table.counts)
    return float(largest.sum() / table.total)


def normalized_mutual_information(
    assignment: NDArray[np.integer], class_names: Sequence[str]
) -> float:
    """Returns I(U;V) / ((H(U) + H(V)) / 2), with scikit-learn's default normalization."""
    table = _Contingency.of(assignment, class_names)
    joint = table.counts / table.total
    by_cluster, by_class = table.by_cluster / table.total, table.by_class / table.total
    independent = by_cluster[table.clusters] * by_class[table.classes]
    information = float((joint * np.log(joint / independent)).sum())
    mean_entropy = (_entropy(by_cluster) + _entropy(by_class)) / 2
    return 1.0 if mean_entropy == 0 else max(0.0, information / mean_entropy)


def adjusted_rand_index(assignment: NDArray[np.integer], class_names: Sequence[str]) -> float:
    """Returns the agreement of clusters and classes on pairs: 0 by chance, 1 at most (Hubert and
    Arabie 1985).
    """
    table = _Contingency.of(assignment, class_names)
    pairs_in_both, pairs_in_clusters, pairs_in_classes = (
        _pairs(counts) for counts in (table.counts, table.by_cluster, table.by_class)
    )
    chance = pairs_in_clusters * pairs_in_classes / max(_pairs(np.array([table.total])), 1.0)
    best = (pairs_in_clusters + pairs_in_classes) / 2
    return 1.0 if best == chance else (pairs_in_both - chance) / (best - chance)


def conflict_rate(assignment: NDArray[np.integer], class_names: Sequence[str]) -> float:
    """Returns the share of same-cluster pairs of samples whose classes differ.

    It is 0 if no cluster contains two samples.
    """
    table = _Contingency.of(assignment, class_names)
    together = _pairs(table.by_cluster)
    return 1 - _pairs(table.counts) / together if together else 0.0


def imbalance(sizes: NDArray[np.integer]) -> float:
    """Returns K sum(sizes^2) / n^2, as faiss reports it.

    It is 1 if all clusters have the same size and K if one contains all samples.
    """
    sizes = sizes.astype(np.float64)
    return float(len(sizes) * (sizes**2).sum() / sizes.sum() ** 2)


def size_histogram(sizes: NDArray[np.integer]) -> list[tuple[int, int]]:
    """Returns (smallest size of the bin, number of clusters) for the bins 0, 1, 2-3,
    4-7 and so on.
    """
    bins = np.where(sizes > 0, np.floor(np.log2(np.maximum(sizes, 1))).astype(np.int64) + 1, 0)
    return [
        (2 ** (bin_index - 1) if bin_index else 0, int(count))
        for bin_index, count in enumerate(np.bincount(bins))
    ]


def tightness(sizes: NDArray[np.integer], cosines: NDArray[np.float64]) -> dict[str, float]:
    """Returns quantiles, over nonempty clusters, of the mean cosine of center and members."""
    return _quantiles(cosines[sizes > 0])


def near_duplicates(centers: Embeddings) -> dict[str, Any]:
    """Returns quantiles of the cosine between a center and its nearest other center, and the counts
    above each of `_NEAR`.

    At most `_MAX_SAMPLED_CENTERS` centers, drawn by hash, are searched; `asked` is their number.
    """
    if len(centers) < 2:
        return {"asked": 0}
    sampled = lowest_hashed(len(centers), _MAX_SAMPLED_CENTERS, 0)
    neighbors = CenterScan(centers).nearest(np.ascontiguousarray(centers[sampled]), 2)
    is_self = neighbors.ids == sampled[:, None]
    # Two identical centers with lower ids push a center out of its own top 2: drop the second.
    is_self[~is_self.any(axis=1), 1] = True
    nearest = neighbors.scores[~is_self].astype(np.float64)
    above = {f"above_{bound}": int((nearest > bound).sum()) for bound in _NEAR}
    return {"asked": len(sampled), **above, "quantiles": _quantiles(nearest)}


@dataclass(frozen=True)
class _Contingency:
    """The (cluster, class) pairs that occur: clusters, classes and counts [pairs], and the numbers
    of samples by cluster, by class and in total.
    """

    clusters: NDArray[np.int64]
    classes: NDArray[np.int64]
    counts: NDArray[np.int64]
    by_cluster: NDArray[np.int64]
    by_class: NDArray[np.int64]
    total: int

    @classmethod
    def of(cls, assignment: NDArray[np.integer], class_names: Sequence[str]) -> "_Contingency":
        _, clusters = np.unique(assignment, return_inverse=True)
        _, classes = np.unique(np.asarray(class_names), return_inverse=True)
        num_classes = int(classes.max()) + 1
        pairs, counts = np.unique(
            clusters.astype(np.int64) * num_classes + classes, return_counts=True
        )
        by_cluster, by_class = np.bincount(clusters), np.bincount(classes)
        return cls(
            pairs // num_classes, pairs % num_classes, counts, by_cluster, by_class, len(clusters)
        )


def _pairs(counts: NDArray[np.integer]) -> float:
    sizes = counts.astype(np.float64)
    return float((sizes * (sizes - 1) / 2).sum())


def _quantiles(values: NDArray[np.float64]) -> dict[str, float]:
    return {
        f"{share:g}": float(value)
        for share, value in zip(_QUANTILES, np.quantile(values, _QUANTILES), strict=True)
    }


def _entropy(probabilities: NDArray[np.float64]) -> float:
    present = probabilities[probabilities > 0]
    return float(-(present * np.log(present)).sum())
