"""The linear probe of Pascal VOC 2007: one regression per class against the rest, sharing one C.

The metric is the mean over classes of the 11-point average precision. An image whose only object of
a class is "difficult" is ignored for that class, in training and in the metric.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.training.evaluation.intervals import bootstrap
from mlcd.training.evaluation.label_tables import DIFFICULT
from mlcd.training.evaluation.linear_probe import coarse_to_fine, grid_c
from mlcd.training.evaluation.logistic_regression import LogisticRegression, PrincipalRows, Solution
from mlcd.training.evaluation.measured import Measurement
from mlcd.training.evaluation.scores import Chosen, eleven_point_precision
from mlcd.training.evaluation.splits import Split

NAME: Final = "linear_probe_map_11"
_PARTS: Final = ("train", "validation", "test")


@dataclass(frozen=True)
class Rankings:
    """The regressions' scores of images, float64 [N, A], and the images' tags, int8 [N, A]."""

    scores: NDArray[np.float64]
    tags: NDArray[np.int8]

    def mean_precision(self, chosen: Chosen = slice(None)) -> float:
        """Returns the mean over classes of the 11-point average precision on the chosen images.

        Classes without a positive image among them are left out.
        """
        scores, tags = self.scores[chosen], self.tags[chosen]
        is_scored = tags != DIFFICULT
        precisions = [
            eleven_point_precision(scores[is_scored[:, a], a], tags[is_scored[:, a], a] == 1)
            for a in range(tags.shape[1])
            if (tags[:, a] == 1).any()
        ]
        return float(np.mean(precisions))


def voc_probe(rows: NDArray[np.float32], tags: NDArray[np.int8], split: Split) -> Measurement:
    """Returns the mean average precision on test images with its interval, and the chosen C.

    rows: [N, D]. tags: [N, A], see `SeveralLabels`. Raises InvalidInput for a label that cannot be
    trained or tested.
    """
    _check_labels(tags, split)
    features = torch.from_numpy(np.asarray(rows, dtype=np.float64))
    train = [_build_problem(features, tags[:, a], split.train) for a in range(tags.shape[1])]
    starts: list[Solution | None] = [None] * len(train)
    score_of: dict[int, float] = {}

    def score(index: int) -> float:
        solutions = [
            problem.fit(grid_c(index), start=start)
            for problem, start in zip(train, starts, strict=True)
        ]
        starts[:] = solutions
        score_of[index] = _rank(solutions, features, tags, split.validation).mean_precision()
        return score_of[index]

    best = coarse_to_fine(score)
    fitted = split.train | split.validation
    final = [
        _build_problem(features, tags[:, a], fitted).fit(grid_c(best)) for a in range(tags.shape[1])
    ]
    rankings = _rank(final, features, tags, split.test)
    metrics = {
        NAME: rankings.mean_precision(),
        "validation_map_11": score_of[best],
        "c": grid_c(best),
        "labels": float(tags.shape[1]),
        **{f"{part}_images": float(getattr(split, part).sum()) for part in _PARTS},
    }
    return Measurement(metrics, {NAME: bootstrap(rankings.mean_precision, len(rankings.tags))})


def _build_problem(
    features: torch.Tensor, tags: NDArray[np.int8], part: NDArray[np.bool_]
) -> LogisticRegression:
    chosen = part & (tags != DIFFICULT)
    return LogisticRegression(
        PrincipalRows(features[torch.from_numpy(chosen)]),
        torch.from_numpy(tags[chosen].astype(np.int64)),
        2,
    )


def _rank(
    solutions: Sequence[Solution],
    features: torch.Tensor,
    tags: NDArray[np.int8],
    part: NDArray[np.bool_],
) -> Rankings:
    rows = features[torch.from_numpy(part)]
    columns = [solution.logits(rows)[:, 1] for solution in solutions]
    return Rankings(torch.stack(columns, dim=1).numpy(), tags[part])


def _check_labels(tags: NDArray[np.int8], split: Split) -> None:
    for name, reason in _find_faults(tags, split):
        raise InvalidInput(
            f"label {name} of {tags.shape[1]} cannot be probed: {reason}",
            remedy="leave out rare labels, or give another split",
        )


def _find_faults(tags: NDArray[np.int8], split: Split) -> Iterator[tuple[int, str]]:
    for a in range(tags.shape[1]):
        for part in _PARTS:
            column = tags[getattr(split, part), a]
            if not (column == 1).any():
                yield a, f"no {part} image has it"
        if not (tags[split.train, a] == 0).any():
            yield a, "all images to train on have it"
