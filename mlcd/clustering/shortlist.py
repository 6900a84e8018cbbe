"""The interface of scans that find centers near rows: plain CPU, compiled loops, and GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.types import Embeddings


@dataclass(frozen=True)
class Shortlist:
    """Centers for each row and their float64 scores, [B, S], best first, padded with -1 and -inf.

    sure: mask [B] of rows whose answer is among these centers. clear: mask [B] of rows whose first
    centers are the answer, in order and in float32 score, under any order of summation.
    """

    ids: NDArray[np.int64]
    scores: NDArray[np.float64]
    sure: NDArray[np.bool_]
    clear: NDArray[np.bool_]

    @classmethod
    def of_none(cls, num_rows: int, top: int) -> "Shortlist":
        """Returns an empty shortlist for each row; no row is sure."""
        shape, unsure = (num_rows, top), np.zeros(num_rows, dtype=np.bool_)
        return cls(np.full(shape, -1), np.full(shape, -np.inf), unsure, unsure)


class Shortlister(Protocol):
    """A scan of some centers that finds shortlists among them."""

    name: str

    @property
    def sums_in_order(self) -> bool:
        """Returns whether scores are summed in the order of `exact_scores`."""
        ...

    @property
    def rooms(self) -> Sequence[int]:
        """Returns the rooms to try in order, per center of the answer."""
        ...

    @property
    def batch_rows(self) -> int:
        """Returns the maximum number of rows per call."""
        ...

    def shortlist(self, rows_BD: Embeddings, top: int, room: int) -> Shortlist:
        """Returns the centers that may be among the `top` of each row. With more room, more rows
        are sure.
        """
        ...
