"""Divides rows into cells around pivots, and finds the outside rows that may be near each cell.

Each row lies in the cell of its nearest pivot. Let x lie in cell a and y in cell b, and let their
angle be at most t. Then y lies on the other side of the plane between the pivots, so

    x.(c_a - c_b) <= |c_a - c_b| sin t.

A row is near the cells for which this is true, stored as one bit per row and cell.

Shapes: N rows, K pivots, D dimension.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.kmeans import kmeans
from mlcd.types import Embeddings

# take(rows [n]) returns unit rows [n, D] float32
Take: TypeAlias = Callable[[NDArray[np.int64]], Embeddings]

SLACK: Final = 1e-4  # far above the float32 rounding of a cosine
_LEAST_ROWS: Final = 4096  # fewer rows form a single cell
_LEAST_MEMBERS: Final = 600  # per cell on average: with fewer, each product is too small
_MOST_BITS: Final = 1 << 31  # 256 MiB
_ITERATIONS: Final = 2
_ROWS_OF_A_PIVOT: Final = 16  # sampled rows per pivot
_BLOCK_ROWS: Final = 4096


@dataclass(frozen=True)
class PivotCells:
    """The cells of N rows.

    of_row: cell of each row, int32 [N]. order: rows sorted by cell, ascending in each, int64 [N].
    starts: start of each cell in the order, [K + 1]. bits: for each cell, packed bits of the rows
    that may be near a member, uint8 [K, N / 8].
    """

    of_row: NDArray[np.int32]
    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    bits: NDArray[np.uint8]

    @property
    def num_cells(self) -> int:
        return len(self.bits)

    def members(self, cell: int) -> NDArray[np.int64]:
        """Returns the rows of a cell, ascending."""
        return self.order[self.starts[cell] : self.starts[cell + 1]]

    def earlier_near(self, cell: int) -> NDArray[np.int64]:
        """Returns the rows of earlier cells that may be near a member of this one, ascending."""
        near = np.flatnonzero(np.unpackbits(self.bits[cell], count=len(self.of_row)))
        earlier: NDArray[np.int64] = near[self.of_row[near] < cell]
        return earlier


def find_cells(
    num_rows: int, take: Take, angle: float, *, tick: Callable[[], object] = lambda: None
) -> PivotCells:
    """Returns about √N cells, and the rows within the angle (radians) of each.

    tick: called between blocks.
    """
    pivots = _pivots(num_rows, take)
    tick()
    apart = np.sqrt(np.maximum(2 - 2 * pivots @ pivots.T, 0)) * math.sin(min(angle, math.pi / 2))
    of_row = np.zeros(num_rows, np.int32)
    bits = np.zeros((len(pivots), -(-num_rows // 8)), np.uint8)
    for start in range(0, num_rows, _BLOCK_ROWS):
        part = slice(start, min(start + _BLOCK_ROWS, num_rows))
        scores = take(np.arange(part.start, part.stop)) @ pivots.T
        own = scores.argmax(axis=1)
        near = scores.max(axis=1)[:, None] - scores <= apart[own] + SLACK
        of_row[part] = own
        packed = np.packbits(near.T, axis=1)
        bits[:, start // 8 : start // 8 + packed.shape[1]] = packed
        tick()
    order = np.argsort(of_row, kind="stable")
    starts = np.searchsorted(of_row[order], np.arange(len(pivots) + 1))
    return PivotCells(of_row, order, starts, bits)


def _pivots(num_rows: int, take: Take) -> Embeddings:
    """Returns the k-means centers of a sample; for few rows, the first row (none if empty)."""
    if num_rows < max(_LEAST_ROWS, _LEAST_MEMBERS):
        return take(np.arange(min(1, num_rows)))
    num = min(math.isqrt(num_rows), num_rows // _LEAST_MEMBERS, _MOST_BITS // num_rows)
    sample = take(np.arange(0, num_rows, max(1, num_rows // (num * _ROWS_OF_A_PIVOT))))
    distinct = sample[sorted({row.tobytes(): index for index, row in enumerate(sample)}.values())]
    clustering = kmeans([distinct], min(num, len(distinct)), iterations=_ITERATIONS, seed=0)
    return clustering.centers
