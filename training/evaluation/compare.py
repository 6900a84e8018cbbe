"""The comparison of two models on the same images, by McNemar's exact test."""

from dataclasses import dataclass
from fractions import Fraction
from math import comb
from typing import Any, Final

import numpy as np

from mlcd.errors import InvalidInput
from mlcd.training.evaluation.intervals import Interval, bootstrap
from mlcd.training.evaluation.stored_results import StoredResults

# Fine-tuning can be compared with the linear probe.
_COMPARABLE: Final = {"fine-tune": "linear-probe"}


@dataclass(frozen=True)
class Comparison:
    """Two models' accuracies on the same images.

    first, second: shares of right images. difference: first minus second, with its interval over
    images. only_first, only_second: numbers of images that only this model has right. p: the
    probability of this difference or a larger one if both models were equally good.
    """

    images: int
    first: float
    second: float
    difference: float
    interval: Interval
    only_first: int
    only_second: int
    p: float

    def facts(self) -> dict[str, Any]:
        return {**vars(self), "interval": list(self.interval)}

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.first:.4g} and {self.second:.4g} of {self.images} images are right: difference "
            f"{self.difference:+.4g} [{low:+.4g}, {high:+.4g}]; right only in the first:"
            f" {self.only_first}, only in the second: {self.only_second}, McNemar p = {self.p:.3g}"
        )


def compare(first: StoredResults, second: StoredResults) -> Comparison:
    """Compares two evaluations.

    Raises InvalidInput unless both have the same images, split and kind.
    """
    _check_comparable(first, second)
    row_of_key = {key: row for row, key in enumerate(second.keys)}
    first_right = first.right
    second_right = second.right[[row_of_key[key] for key in first.keys]]
    only_first = int((first_right & ~second_right).sum())
    only_second = int((second_right & ~first_right).sum())
    differences = first_right.astype(np.int64) - second_right
    return Comparison(
        images=len(differences),
        first=float(first_right.mean()),
        second=float(second_right.mean()),
        difference=float(differences.mean()),
        interval=bootstrap(lambda rows: float(differences[rows].mean()), len(differences)),
        only_first=only_first,
        only_second=only_second,
        p=mcnemar(only_first, only_second),
    )


def mcnemar(only_first: int, only_second: int) -> float:
    """Returns the two-sided p of McNemar's exact test on images that only one model has right."""
    num, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(comb(num, k) for k in range(fewer + 1))
    return min(1.0, float(Fraction(2 * tail, 2**num)))


def _check_comparable(first: StoredResults, second: StoredResults) -> None:
    first_protocol, second_protocol = first.record["protocol"], second.record["protocol"]
    if first_protocol["split"] != second_protocol["split"]:
        raise InvalidInput(
            "the two evaluations must have the same images and split",
            remedy="test both on the same images; their protocols must have the same `split`",
        )
    if _comparable_kind(first_protocol["kind"]) != _comparable_kind(second_protocol["kind"]):
        raise InvalidInput(
            f"{first_protocol['kind']} and {second_protocol['kind']} cannot be compared",
            remedy="compare two evaluations of the same kind",
        )
    if set(first.keys) != set(second.keys):
        raise InvalidInput("the two evaluations decoded different images")


def _comparable_kind(kind: str) -> str:
    return _COMPARABLE.get(kind, kind)
