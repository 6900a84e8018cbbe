"""How well clusters agree with known classes, and how even they are."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def purity(assignment: NDArray[np.integer], class_names: Sequence[str]) -> float:
    """Share of samples whose class is the majority class of their cluster."""
    table = _contingency(assignment, class_names)
    return float(table.max(axis=1).sum() / table.sum())


def normalized_mutual_information(assignment: NDArray[np.integer], class_names: Sequence[str]) -> float:
    """I(U;V) / ((H(U) + H(V)) / 2): scikit-learn's default normalization."""
    joint = _contingency(assignment, class_names) / len(class_names)
    by_cluster, by_class = joint.sum(axis=1), joint.sum(axis=0)
    present = joint > 0
    independent = np.outer(by_cluster, by_class)
    information = float((joint[present] * np.log(joint[present] / independent[present])).sum())
    mean_entropy = (_entropy(by_cluster) + _entropy(by_class)) / 2
    return 1.0 if mean_entropy == 0 else max(0.0, information / mean_entropy)


def imbalance(sizes: NDArray[np.integer]) -> float:
    """K sum(sizes^2) / n^2: 1 when all clusters are equal, k when one holds everything (as faiss reports it)."""
    sizes = sizes.astype(np.float64)
    return float(len(sizes) * (sizes**2).sum() / sizes.sum() ** 2)


def _contingency(assignment: NDArray[np.integer], class_names: Sequence[str]) -> NDArray[np.float64]:
    _, clusters = np.unique(assignment, return_inverse=True)
    _, classes = np.unique(np.asarray(class_names), return_inverse=True)
    table = np.zeros((clusters.max() + 1, classes.max() + 1), dtype=np.float64)
    np.add.at(table, (clusters, classes), 1.0)
    return table


def _entropy(probabilities: NDArray[np.float64]) -> float:
    present = probabilities[probabilities > 0]
    return float(-(present * np.log(present)).sum())
