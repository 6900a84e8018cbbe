"""What share of predictions is right, by the metrics of CLIP's data sets."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Metric = Literal["accuracy", "mean-per-class"]


def score(predicted: NDArray[np.integer], classes: NDArray[np.integer], metric: Metric) -> float:
    """accuracy: of all samples. mean-per-class: the mean over the classes that occur of each one's share.

    predicted, classes: [N], N at least 1.
    """
    right = predicted == classes
    if metric == "accuracy":
        return float(right.mean())
    totals = np.bincount(classes)
    occurring = totals > 0
    return float((np.bincount(classes, weights=right)[occurring] / totals[occurring]).mean())
