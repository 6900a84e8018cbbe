"""The comparison of two models on the same images, by McNemar's exact test."""

from dataclasses import dataclass
from fractions import Fraction
from math import comb
from typing import Any, Final

import numpy as np

from mlcd.errors import InvalidInput
from mlcd.training.evaluation.intervals import Interval, bootstrap
from mlcd.training.evaluation.stored_results import StoredResults

# Fine-tuning is tested beside the linear probe.
_BESIDE: Final = {"fine-tune": "linear-probe"}


@dataclass(frozen=True)
class Comparison:
    """Two models' right answers on the same images.

    only_first, only_second: the numbers of images that one of them alone has right. difference:
    the first's share of right answers less the second's, with its interval over images. p: the
    probability of such a difference, or a larger one, if both were equally good.
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
            f"{self.difference:+.4g} [{low:+.4g}, {high:+.4g}]; right in one alone "
            f"{self.only_first} and {self.only_second}, McNemar p {self.p:.3g}"
        )


def compare(first: StoredResults, second: StoredResults) -> Comparison:
    """Compares two evaluations. Raises InvalidInput unless both tested the same images alike."""
    _check_alike(first, second)
    place = {key: row for row, key in enumerate(second.keys)}
    a = first.right
    b = second.right[[place[key] for key in first.keys]]
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    change = a.astype(np.int64) - b
    return Comparison(
        images=len(a),
        first=float(a.mean()),
        second=float(b.mean()),
        difference=float(change.mean()),
        interval=bootstrap(lambda chosen: float(change[chosen].mean()), len(change)),
        only_first=only_a,
        only_second=only_b,
        p=mcnemar(only_a, only_b),
    )


def mcnemar(only_first: int, only_second: int) -> float:
    """Returns the two-sided p of McNemar's test: each such image falls to either with 1/2."""
    num, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(comb(num, k) for k in range(fewer + 1))
    return min(1.0, float(Fraction(2 * tail, 2**num)))


def _check_alike(first: StoredResults, second: StoredResults) -> None:
    ours, theirs = first.record["protocol"], second.record["protocol"]
    if ours["split"] != theirs["split"]:
        raise InvalidInput(
            "the two evaluations are not of the same images and split",
            remedy="test both on the same images; `split` in the protocol tells",
        )
    if _comparable_kind(ours["kind"]) != _comparable_kind(theirs["kind"]):
        raise InvalidInput(
            f"{ours['kind']} and {theirs['kind']} do not ask the same of an image",
            remedy="compare two evaluations of one kind",
        )
    if set(first.keys) != set(second.keys):
        raise InvalidInput("the two evaluations could not use the same images")


def _comparable_kind(kind: str) -> str:
    return _BESIDE.get(kind, kind)
