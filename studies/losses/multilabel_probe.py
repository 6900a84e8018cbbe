"""A linear probe of several attributes at once, measured by mean average precision.

Each attribute has a logistic regression of its own against the rest. All attributes share one C,
that of the best validation mAP among powers of ten. The tested models are fitted again with it, on
training and validation images together.
"""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.training.evaluation.logistic_regression import LogisticRegression, PrincipalRows, Solution
from mlcd.training.evaluation.scores import average_precision
from mlcd.training.evaluation.splits import split_samples

GRID: Final = tuple(10.0**power for power in range(-4, 3))


def best_c(scored: Callable[[float], float]) -> float:
    """Returns the C of GRID with the best score, the smallest of equals.

    All are tried, though the weak penalties cost most: with a few hundred validation images, the
    scores have more than one peak.
    """
    scores = {c: scored(c) for c in GRID}
    return min(scores, key=lambda c: (-scores[c], c))


def multilabel_probe(
    rows: NDArray[np.float32],
    tags: NDArray[np.bool_],
    splits: NDArray[np.float64],
    *,
    hold_out: float,
) -> Iterator[tuple[str, float]]:
    """Yields the mean average precision on held-out and on validation samples, and the chosen C.

    rows: [N, D]. tags: [N, A], true if a sample has the attribute. splits: [N], see mlcd.keys.
    Raises InvalidInput for rows that are not finite, and for an attribute that all or none of the
    training samples have, or that no validation or test sample has.
    """
    if len(broken := np.flatnonzero(~np.isfinite(rows).all(axis=1))):
        raise InvalidInput(
            f"row {broken[0]} of the features holds NaN or Inf", remedy="has the model diverged?"
        )
    split = split_samples(splits, hold_out)
    _check(tags, split.train, split.validation, split.test)
    features = torch.from_numpy(np.asarray(rows, dtype=np.float64))
    scores: dict[float, float] = {}
    problems = _problems(features, tags, split.train)
    solutions: list[Solution | None] = [None] * len(problems)

    def scored(c: float) -> float:
        found = [
            problem.fit(c, start=start) for problem, start in zip(problems, solutions, strict=True)
        ]
        solutions[:] = found
        scores[c] = _mean_average_precision(found, features, tags, split.validation)
        return scores[c]

    best = best_c(scored)
    final = [
        problem.fit(best) for problem in _problems(features, tags, split.train | split.validation)
    ]
    yield "multilabel_map", _mean_average_precision(final, features, tags, split.test)
    yield "validation_map", scores[best]
    yield "c", best
    yield "attributes", float(tags.shape[1])
    yield "test_images", float(split.test.sum())


def _problems(
    features: torch.Tensor, tags: NDArray[np.bool_], mask: NDArray[np.bool_]
) -> list[LogisticRegression]:
    chosen = PrincipalRows(features[torch.from_numpy(mask)])
    return [
        LogisticRegression(chosen, torch.from_numpy(tags[mask, column].astype(np.int64)), 2)
        for column in range(tags.shape[1])
    ]


def _mean_average_precision(
    solutions: list[Solution],
    features: torch.Tensor,
    tags: NDArray[np.bool_],
    mask: NDArray[np.bool_],
) -> float:
    weights = torch.cat([solution.weight for solution in solutions])
    biases = torch.cat([solution.bias for solution in solutions])
    logits = (features[torch.from_numpy(mask)] @ weights.T + biases).numpy()
    return float(
        np.mean(
            [
                average_precision(logits[:, column], tags[mask, column])
                for column in range(tags.shape[1])
            ]
        )
    )


def _check(tags: NDArray[np.bool_], *parts: NDArray[np.bool_]) -> None:
    train, validation, test = (tags[part] for part in parts)
    enough: NDArray[np.bool_] = (
        np.any(train, axis=0)
        & ~np.all(train, axis=0)
        & np.any(validation, axis=0)
        & np.any(test, axis=0)
    )
    poor = np.flatnonzero(~enough).tolist()
    if poor or not tags.shape[1]:
        which = f"attribute {poor[0]} of {tags.shape[1]}" if poor else "a table of no attributes"
        raise InvalidInput(
            f"{which} cannot be probed: some images to train on must have it and some not, and one "
            "at least to"
            " validate and to test on",
            remedy="leave out rare attributes",
        )
