"""Zero-shot classification (Radford et al. 2021): the classes are texts, and the nearest one wins.

A class stands for the mean of all its prompts, each of unit length, and is made a unit row again.
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
    """Returns the prompts of every name of every class, class by class, and their number each."""
    prompts = [
        [prompt(template, name) for name in of_class for template in templates]
        for of_class in names
    ]
    return (
        [text for of_class in prompts for text in of_class],
        np.array([len(of_class) for of_class in prompts]),
    )


def classifier(rows: Embeddings, counts: NDArray[np.int64]) -> Embeddings:
    """Returns a unit row for each class, [C, D], the mean of the prompts' unit rows.

    rows: [sum of counts, D], class by class.
    """
    starts = np.cumsum(counts) - counts
    sums = np.add.reduceat(rows.astype(np.float64), starts, axis=0)
    return unit_rows(sums / counts[:, None])


def ranks(images: Embeddings, classes: Embeddings, right: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [N]: how many other classes are as near to each image as its own, or nearer.

    Classes at the same distance count against the image: nothing is right by its place in a list.
    """
    cosines = (images.astype(np.float64) @ classes.T.astype(np.float64)).astype(np.float32)
    own = cosines[np.arange(len(images)), right]
    ahead: NDArray[np.int64] = np.count_nonzero(cosines >= own[:, None], axis=1) - 1
    return ahead


@dataclass(frozen=True)
class Figures:
    """Metrics by name, and the 95 % interval of each that has one."""

    metrics: Mapping[str, float]
    intervals: Mapping[str, Interval]


def zero_shot_figures(rank: NDArray[np.int64], right: NDArray[np.int64], num: int) -> Figures:
    """Returns top-1, top-5 if there are more than five classes, and the mean per class.

    rank, right (the class): [N]. num: the number of classes.
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
    everything = np.arange(len(rank))
    return Figures(
        {name: measure(everything) for name, measure in measures.items()},
        {name: bootstrap(measure, len(rank)) for name, measure in measures.items()},
    )
