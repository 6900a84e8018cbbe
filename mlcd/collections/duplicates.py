"""The groups of items that are nearly the same, by the cosine of their embeddings.

All pairs are compared, one tile of them at a time; one number is kept for each row. Two items are
in one group where a chain of pairs above the similarity joins them, so the ends of a long chain may
be less alike than that.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.progress import Meter
from mlcd.types import Embeddings

DEFAULT_SIMILARITY: Final = 0.95
TILE_ROWS: Final = 2048
_DIGITS: Final = 6  # float32 holds no more

# read(start, stop) returns unit rows [stop - start, D] float32
Read = Callable[[int, int], Embeddings]


@dataclass(frozen=True)
class Group:
    """A group of near duplicates.

    rows: two or more, ascending, int64 [n]. similarities: that of each row to the most similar
    other one.
    """

    rows: NDArray[np.int64]
    similarities: NDArray[np.float32]

    def record(self, ids: Sequence[str]) -> dict[str, Any]:
        """Returns the group in the form that users get. ids: those of all rows."""
        similarities = [round(similarity, _DIGITS) for similarity in self.similarities.tolist()]
        return {"ids": [ids[row] for row in self.rows], "similarities": similarities}


def duplicate_groups(
    num_rows: int, read: Read, similarity: float, *, meter: Meter, tile_rows: int = TILE_ROWS
) -> list[Group]:
    """Returns all groups, ordered by their first row.

    Memory holds two tiles of rows, one of scores, and 12 bytes a row. The meter advances by pairs
    of tiles. Raises InvalidInput.
    """
    if not -1 <= similarity <= 1:
        raise InvalidInput(f"{similarity:g} is no cosine", remedy="give a similarity in [-1, 1]")
    group, best = np.arange(num_rows, dtype=np.int64), np.full(num_rows, -1.0, dtype=np.float32)
    for start in range(0, num_rows, tile_rows):
        rows = read(start, min(start + tile_rows, num_rows))
        for other in range(start, num_rows, tile_rows):
            others = rows if other == start else read(other, min(other + tile_rows, num_rows))
            scores = rows @ others.T
            first, second = np.nonzero(scores >= similarity)
            joined = first + start < second + other
            first, second = first[joined], second[joined]
            found = np.minimum(scores[first, second], 1.0)  # rounding
            for row, offset in ((first, start), (second, other)):
                np.maximum.at(best, row + offset, found)
            _join(group, first + start, second + other)
            meter.advance()
    return [Group(rows, best[rows]) for rows in _members(group)]


def joined_groups(
    num_rows: int, first: NDArray[np.int64], second: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Returns the rows of each group that the pairs join, ascending, ordered by their first row."""
    group = np.arange(num_rows, dtype=np.int64)
    _join(group, first, second)
    return list(_members(group))


def num_tile_pairs(num_rows: int, tile_rows: int = TILE_ROWS) -> int:
    tiles = -(-num_rows // tile_rows)
    return tiles * (tiles + 1) // 2


def _join(group: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64]) -> None:
    """Joins the two groups of each pair into one, named by its lowest row.

    Every name points at itself, before and after.
    """
    while True:
        left, right = group[first], group[second]
        apart = left != right
        if not apart.any():
            return
        np.minimum.at(group, np.maximum(left, right)[apart], np.minimum(left, right)[apart])
        while (group[group] != group).any():
            group[:] = group[group]


def _members(group: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    order = np.argsort(group, kind="stable")
    _, starts = np.unique(group[order], return_index=True)
    for members in np.split(order, starts[1:]):
        if len(members) > 1:
            yield members
