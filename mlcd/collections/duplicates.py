"""Groups of items that are nearly the same, by the cosine of their embeddings.

All pairs are compared, a tile of them at a time; what is kept is one number for each row. Two items are of one group
where a chain of pairs above the similarity joins them, so the ends of a long chain may be less alike than that.
"""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.progress import Meter
from mlcd.types import Embeddings

DEFAULT_SIMILARITY: Final = 0.95
TILE_ROWS: Final = 2048

Read = Callable[[int, int], Embeddings]
"""read(start, stop): unit rows [stop - start, D] float32."""


def duplicate_groups(
    num_rows: int, read: Read, similarity: float, *, meter: Meter, tile_rows: int = TILE_ROWS
) -> list[NDArray[np.int64]]:
    """The rows of each group of two or more, ascending; groups by their first row.

    Memory: two tiles of rows, one of scores, 8 bytes a row. The meter advances by pairs of tiles. Raises InvalidInput.
    """
    if not -1 <= similarity <= 1:
        raise InvalidInput(f"{similarity:g} is no cosine", remedy="give a similarity in [-1, 1]")
    group = np.arange(num_rows, dtype=np.int64)
    for start in range(0, num_rows, tile_rows):
        rows = read(start, min(start + tile_rows, num_rows))
        for other in range(start, num_rows, tile_rows):
            others = rows if other == start else read(other, min(other + tile_rows, num_rows))
            first, second = np.nonzero(rows @ others.T >= similarity)
            joined = first + start < second + other
            _join(group, first[joined] + start, second[joined] + other)
            meter.advance()
    return list(_members(group))


def num_tile_pairs(num_rows: int, tile_rows: int = TILE_ROWS) -> int:
    tiles = -(-num_rows // tile_rows)
    return tiles * (tiles + 1) // 2


def _join(group: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64]) -> None:
    """Each pair's two groups become one, named by its lowest row. Every name points at itself, before and after."""
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
