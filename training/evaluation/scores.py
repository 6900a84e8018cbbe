"""The metrics of CLIP's data sets."""

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput

Metric = Literal["accuracy", "mean-per-class", "mean-top1-top5", "roc-auc"]

_TOP: Final = 5
_RECALLS: Final = 11  # VOC's: 0, 0.1, ..., 1

# A part of the samples, by their numbers.
Chosen: TypeAlias = NDArray[np.integer[Any]] | slice


@dataclass(frozen=True)
class Answers:
    """The answers of a classifier about samples of known class.

    classes: int64 [N], the right ones. rank: int64 [N], the number of classes put before the right
    one. margin: float64 [N], by how much the second of two classes is preferred to the first.
    num_classes: of the classifier.
    """

    classes: NDArray[np.int64]
    rank: NDArray[np.int64]
    margin: NDArray[np.float64]
    num_classes: int

    @property
    def right(self) -> NDArray[np.bool_]:
        right: NDArray[np.bool_] = self.rank == 0
        return right

    def score(self, metric: Metric, chosen: Chosen = slice(None)) -> float:
        """Returns the metric of all samples, or of some. Raises InvalidInput if it has none."""
        classes, rank = self.classes[chosen], self.rank[chosen]
        if metric == "roc-auc":
            if self.num_classes != 2:
                raise InvalidInput(
                    f"the area under the ROC curve is for two classes, not {self.num_classes}"
                )
            return roc_auc(self.margin[chosen], classes == 1)
        if metric == "mean-top1-top5":
            if self.num_classes <= _TOP:
                raise InvalidInput(f"with {self.num_classes} classes the top 5 are always right")
            return float(((rank == 0).mean() + (rank < _TOP).mean()) / 2)
        return right_share(rank == 0, classes, metric)


def answers(scores: NDArray[np.floating], classes: NDArray[np.int64]) -> Answers:
    """Returns the answers of a classifier that gives each class a score, [N, C].

    Of equal scores the lower class comes first.
    """
    own = np.take_along_axis(scores, classes[:, None], axis=1)
    lower = np.arange(scores.shape[1]) < classes[:, None]
    rank = np.count_nonzero((scores > own) | ((scores == own) & lower), axis=1)
    margin = (scores[:, 1] - scores[:, 0]).astype(np.float64)
    return Answers(classes, rank, margin, scores.shape[1])


def score(predicted: NDArray[np.integer], classes: NDArray[np.integer], metric: Metric) -> float:
    """Returns the share of predictions that are right; see `right_share`.

    predicted, classes: [N], N at least 1.
    """
    return right_share(predicted == classes, classes, metric)


def right_share(right: NDArray[np.bool_], classes: NDArray[np.integer], metric: Metric) -> float:
    """Returns the share of answers that are right.

    accuracy: of all samples. mean-per-class: the mean of the shares of the classes that occur.
    right, classes: [N], N at least 1.
    """
    if metric == "accuracy":
        return float(right.mean())
    assert metric == "mean-per-class"
    totals = np.bincount(classes)
    occurring = totals > 0
    return float((np.bincount(classes, weights=right)[occurring] / totals[occurring]).mean())


def roc_auc(ranking: NDArray[np.floating], positive: NDArray[np.bool_]) -> float:
    """Returns the share of pairs of a positive and a negative sample that are in the right order.

    Equal scores count a half. It is NaN if there are only positive or only negative samples.
    """
    negatives = np.sort(ranking[~positive])
    if not len(negatives) or not positive.any():
        return float("nan")
    places = [np.searchsorted(negatives, ranking[positive], side) for side in ("left", "right")]
    return float((places[0] + places[1]).mean() / 2 / len(negatives))


def average_precision(ranking: NDArray[np.floating], positive: NDArray[np.bool_]) -> float:
    """Returns the sum over thresholds of precision times the recall gained.

    All points count, not VOC's 11; equal scores share one threshold. ranking, positive: [N], at
    least one of them positive.
    """
    positives, retrieved = _count_down_to_scores(ranking, positive)
    return float((np.diff(positives, prepend=0) * positives / retrieved).sum() / positives[-1])


def eleven_point_precision(ranking: NDArray[np.floating], positive: NDArray[np.bool_]) -> float:
    """Returns VOC 2007's average precision: the mean over the recalls 0, 0.1, ..., 1 of the highest
    precision at that recall or a higher one.

    ranking, positive: [N], without "difficult" samples, at least one positive. Equal scores share
    one threshold. It is NaN without a positive sample.
    """
    positives, retrieved = _count_down_to_scores(ranking, positive)
    if not positives[-1]:
        return float("nan")
    precision = positives / retrieved
    # Recall is compared in integers, because 3 / 10 and 3 * 0.1 differ.
    reached = [
        precision[10 * positives >= tenth * positives[-1]].max() for tenth in range(_RECALLS)
    ]
    return float(np.mean(reached))


def _count_down_to_scores(
    ranking: NDArray[np.floating], positive: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the numbers of positive and of all samples down to each distinct score."""
    order = np.argsort(-ranking, kind="stable")
    last_of_equals = np.append(np.diff(ranking[order]) != 0, True)
    positives = np.cumsum(positive[order])[last_of_equals]
    return positives, np.flatnonzero(last_of_equals) + 1
