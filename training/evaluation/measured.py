"""The metrics of one representation, with intervals and the outcome for each image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mlcd.training.evaluation.intervals import Interval, bootstrap
from mlcd.training.evaluation.scores import Answers, Metric


@dataclass(frozen=True)
class Measurement:
    """Metrics by name, and intervals of some of them.

    right: bool [N], for each tested image in order; None if the metrics do not count images. name,
    answers, metric: name of the main metric, the answers it is computed from, and its kind.
    """

    metrics: dict[str, float]
    intervals: dict[str, Interval] = field(default_factory=dict)
    right: NDArray[np.bool_] | None = None
    name: str = ""
    answers: Answers | None = None
    metric: Metric = "accuracy"


def measure_answers(
    name: str, answers: Answers, metric: Metric, facts: Mapping[str, float] | None = None
) -> Measurement:
    """Returns the metric of the answers with its interval.

    facts: further metrics to report, in their order; may contain the metric itself.
    """
    num = len(answers.classes)
    return Measurement(
        {name: answers.score(metric), "test_images": float(num), **(facts or {})},
        {name: bootstrap(lambda chosen: answers.score(metric, chosen), num)},
        answers.right,
        name,
        answers,
        metric,
    )


def average_folds(folds: Sequence[Measurement]) -> Measurement:
    """Returns the mean over folds with the same test images; a single fold stays unchanged."""
    if len(folds) == 1:
        return folds[0]
    metrics = {
        name: float(np.mean([fold.metrics[name] for fold in folds])) for name in folds[0].metrics
    }
    first = folds[0]
    if first.answers is None:
        return Measurement(metrics)
    answers = [fold.answers for fold in folds if fold.answers is not None]
    spread = float(np.std([fold.metrics[first.name] for fold in folds], ddof=1))
    interval = bootstrap(
        lambda chosen: float(
            np.mean([fold_answers.score(first.metric, chosen) for fold_answers in answers])
        ),
        len(first.answers.classes),
    )
    return Measurement({**metrics, "deviation_of_folds": spread}, {first.name: interval})
