"""The metrics of the data sets in CLIP's evaluation."""

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput

Metric = Literal["accuracy", "mean-per-class", "mean-top1-top5", "roc-auc"]

_TOP: Final = 5
_RECALLS: Final = 11  # VOC's: 0, 0.1, ..., 1

# The samples to score, as indices or a slice.
Chosen: TypeAlias = NDArray[np.integer[Any]] | slice


@dataclass(frozen=True)
class Answers:
    """The answers of a classifier about N samples of known class.

    classes: int64 [N], right classes. rank: int64 [N], number of classes ranked before the right
    class. margin: float64 [N], score of class 1 minus score of class 0, for two classes.
    num_classes: number of classes of the classifier.
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
        """Returns the metric of the chosen samples.

        Raises InvalidInput if the metric does not apply to this number of classes.
        """
        classes, rank = self.classes[chosen], self.rank[chosen]
        if metric == "roc-auc":
            if self.num_classes != 2:
                raise InvalidInput(
                    f"the area under the ROC curve requires two classes, got {self.num_classes}"
                )
            return roc_auc(self.margin[chosen], classes == 1)
        if metric == "mean-top1-top5":
            if self.num_classes <= _TOP:
                raise InvalidInput(
                    f"mean-top1-top5 requires more than {_TOP} classes, got {self.num_classes}"
                )
            return float(((rank == 0).mean() + (rank < _TOP).mean()) / 2)
        return right_share(rank == 0, classes, metric)


def answers(scores: NDArray[np.floating], classes: NDArray[np.int64]) -> Answers:
    """Returns the answers of a classifier with scores [N, C]; ties go to the lower class."""
    right_score = np.take_along_axis(scores, classes[:, None], axis=1)
    is_lower = np.arange(scores.shape[1]) < classes[:, None]
    rank = np.count_nonzero((scores > right_score) | ((scores == right_score) & is_lower), axis=1)
    margin = (scores[:, 1] - scores[:, 0]).astype(np.float64)
    return Answers(classes, rank, margin, scores.shape[1])


def score(predicted: NDArray[np.integer], classes: NDArray[np.integer], metric: Metric) -> float:
    """Returns the share of predictions that are right; see `right_share`.

    predicted, classes: [N], N at least 1.
    """
    return right_share(predicted == classes, classes, metric)


def right_share(right: NDArray[np.bool_], classes: NDArray[np.integer], metric: Metric) -> float:
    """Returns the share of answers that are right.

    accuracy: over all samples. mean-per-class: the accuracy of each occurring class, averaged.
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

    Ties count one half. NaN if there are only positive or only negative samples.
    """
    negatives = np.sort(ranking[~positive])
    if not len(negatives) or not positive.any():
        return float("nan")
    num_below = [np.searchsorted(negatives, ranking[positive], side) for side in ("left", "right")]
    return float((num_below[0] + num_below[1]).mean() / 2 / len(negatives))


def average_precision(ranking: NDArray[np.floating], positive: NDArray[np.bool_]) -> float:
    """Returns the average precision: the sum over thresholds of precision times the gain in recall.

    Uses all thresholds, not VOC's 11 recalls; ties share a threshold. ranking: scores [N].
    positive: bool [N], at least one True.
    """
    positives, retrieved = _count_retrieved(ranking, positive)
    return float((np.diff(positives, prepend=0) * positives / retrieved).sum() / positives[-1])


def eleven_point_precision(ranking: NDArray[np.floating], positive: NDArray[np.bool_]) -> float:
    """Returns VOC 2007's average precision: the mean over the recalls 0, 0.1, ..., 1 of the highest
    precision at that recall or above.

    ranking: scores [N]. positive: bool [N]; both without "difficult" samples. Ties share a
    threshold. NaN without a positive sample.
    """
    positives, retrieved = _count_retrieved(ranking, positive)
    if not positives[-1]:
        return float("nan")
    precision = positives / retrieved
    # Recall is compared in integers, because 3 / 10 and 3 * 0.1 differ.
    precisions = [
        precision[10 * positives >= tenth * positives[-1]].max() for tenth in range(_RECALLS)
    ]
    return float(np.mean(precisions))


def _count_retrieved(
    ranking: NDArray[np.floating], positive: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns, for each distinct score, descending: the number of positive samples, and of all
    samples, with at least this score.
    """
    order = np.argsort(-ranking, kind="stable")
    is_last_of_tie = np.append(np.diff(ranking[order]) != 0, True)
    positives = np.cumsum(positive[order])[is_last_of_tie]
    return positives, np.flatnonzero(is_last_of_tie) + 1
