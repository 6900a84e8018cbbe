"""Zero-shot classification (Radford et al. 2021): an image gets the class of the nearest text.

A class is represented by the normalized mean of the unit embeddings of all its prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.models.prompts import prompt
from mlcd.training.evaluation.intervals import Interval, bootstrap
from mlcd.training.evaluation.scores import right_share
from mlcd.types import Embeddings, unit_rows

TOP: Final = 5


def class_prompts(
    names: Sequence[Sequence[str]], templates: Sequence[str]
) -> tuple[list[str], NDArray[np.int64]]:
    """Returns all prompts, class by class, and the number of prompts of each class."""
    prompts = [
        [prompt(template, name) for name in names_of_class for template in templates]
        for names_of_class in names
    ]
    return (
        [text for prompts_of_class in prompts for text in prompts_of_class],
        np.array([len(prompts_of_class) for prompts_of_class in prompts]),
    )


def classifier(rows: Embeddings, counts: NDArray[np.int64]) -> Embeddings:
    """Returns a unit row for each class, [C, D]: the normalized mean of its prompts' unit rows.

    rows: [sum of counts, D], class by class.
    """
    starts = np.cumsum(counts) - counts
    sums = np.add.reduceat(rows.astype(np.float64), starts, axis=0)
    return unit_rows(sums / counts[:, None])


def ranks(images: Embeddings, classes: Embeddings, right: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns ranks [N]: for each image the number of other classes as near as its own, or nearer.

    Ties count against the image, so that no answer is right by the order of the classes.
    """
    cosines = (images.astype(np.float64) @ classes.T.astype(np.float64)).astype(np.float32)
    right_cosines = cosines[np.arange(len(images)), right]
    ahead: NDArray[np.int64] = np.count_nonzero(cosines >= right_cosines[:, None], axis=1) - 1
    return ahead


@dataclass(frozen=True)
class Figures:
    """Metrics by name, and the 95 % intervals of some of them."""

    metrics: Mapping[str, float]
    intervals: Mapping[str, Interval]


def zero_shot_figures(rank: NDArray[np.int64], right: NDArray[np.int64], num: int) -> Figures:
    """Returns top-1, mean per class, and top-5 if there are more than five classes.

    rank: [N]. right: [N], right classes. num: number of classes.
    """
    top1 = rank == 0
    measures: dict[str, Callable[[NDArray[np.int64]], float]] = {
        "zero_shot_top1": lambda chosen: float(top1[chosen].mean()),
        "zero_shot_mean_per_class": lambda chosen: right_share(
            top1[chosen], right[chosen], "mean-per-class"
        ),
    }
    if num > TOP:
        top5 = rank < TOP
        measures["zero_shot_top5"] = lambda chosen: float(top5[chosen].mean())
    all_rows = np.arange(len(rank))
    return Figures(
        {name: measure(all_rows) for name, measure in measures.items()},
        {name: bootstrap(measure, len(rank)) for name, measure in measures.items()},
    )
