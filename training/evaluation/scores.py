"""The metrics of CLIP's data sets."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Metric = Literal["accuracy", "mean-per-class"]


def score(predicted: NDArray[np.integer], classes: NDArray[np.integer], metric: Metric) -> float:
    """Returns the share of predictions that are right.

    accuracy: of all samples. mean-per-class: the mean of the shares of the classes that occur.
    predicted, classes: [N], N at least 1.
    """
    right = predicted == classes
    if metric == "accuracy":
        return float(right.mean())
    totals = np.bincount(classes)
    occurring = totals > 0
    return float((np.bincount(classes, weights=right)[occurring] / totals[occurring]).mean())


def average_precision(ranking: NDArray[np.floating], positive: NDArray[np.bool_]) -> float:
    """Returns the sum over thresholds of precision times the recall gained.

    All points count, not VOC's 11; equal scores share one threshold. ranking, positive: [N], at
    least one of them positive.
    """
    order = np.argsort(-ranking, kind="stable")
    last_of_equals = np.append(np.diff(ranking[order]) != 0, True)
    found = np.cumsum(positive[order])[last_of_equals]
    shown = np.flatnonzero(last_of_equals) + 1
    return float((np.diff(found, prepend=0) * found / shown).sum() / found[-1])
