"""The interface of the ways to find centers near a row: the CPU, its compiled loops, and a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.types import Embeddings


@dataclass(frozen=True)
class Shortlist:
    """Centers for each row and their float64 scores, [B, S], the highest first; -1 and -inf for
    none.

    sure: [B], where the answer is among them. clear: [B], where the first are the answer in its
    order, and their scores in float32 are its scores, whatever the order of summation.
    """

    ids: NDArray[np.int64]
    scores: NDArray[np.float64]
    sure: NDArray[np.bool_]
    clear: NDArray[np.bool_]

    @classmethod
    def of_none(cls, num_rows: int, top: int) -> "Shortlist":
        """Returns an empty one for each row, none of which is sure."""
        shape, unsure = (num_rows, top), np.zeros(num_rows, dtype=np.bool_)
        return cls(np.full(shape, -1), np.full(shape, -np.inf), unsure, unsure)


class Shortlister(Protocol):
    """A scan of some centers that finds shortlists among them."""

    name: str

    @property
    def sums_in_order(self) -> bool:
        """Tells whether scores are summed in the order of `exact_scores`."""
        ...

    @property
    def rooms(self) -> Sequence[int]:
        """Returns the rooms to ask with, one after the other, for each of the answer."""
        ...

    @property
    def batch_rows(self) -> int:
        """Returns the most rows that it is asked for at once."""
        ...

    def shortlist(self, rows_BD: Embeddings, top: int, room: int) -> Shortlist:
        """Returns the centers that may be among the `top` of each row. With more room, more rows
        are sure.
        """
        ...
