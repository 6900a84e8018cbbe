"""Vectors in whole numbers of eight bits, and what that rounds.

Shapes: B rows of a batch, D dimension.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.matmul import inner_products
from mlcd.types import Embeddings

TINY: Final = np.float32(1e-30)  # the least scale, which is not zero
_AT_ONCE: Final = 1 << 18  # components: few, so that they stay in the cache


class EightBitRows(NamedTuple):
    """Rows y in whole numbers q, each with a scale s, so that s q is near y.

    unsigned: q + levels + 1, uint8 [B, D]. The others are float32 [B]: scales; squares: the sum of
    q^2; left_out: that of (y - s q)^2; and offsets: x.m for a row x = y + m, less the shift m.
    """

    unsigned: NDArray[np.uint8]
    scales: NDArray[np.float32]
    squares: NDArray[np.float32]
    left_out: NDArray[np.float32]
    offsets: NDArray[np.float32]

    @classmethod
    def unwritten(cls, num_rows: int, dimension: int) -> "EightBitRows":
        return cls(np.empty((num_rows, dimension), np.uint8), *np.empty((4, num_rows), np.float32))


def round_rows(
    rows_BD: Embeddings, shift_D: NDArray[np.float32], levels: int, rounded: EightBitRows
) -> None:
    """Writes the rows, less the shift, in whole numbers of at most `levels` in size."""
    at_once = max(1, _AT_ONCE // rows_BD.shape[1])
    for start in range(0, len(rows_BD), at_once):
        part = slice(start, start + at_once)
        rows = rows_BD[part] - shift_D
        numbers, scales = quantized(rows, levels)
        rounded.scales[part] = scales
        np.add(numbers, np.float32(levels + 1), out=rounded.unsigned[part], casting="unsafe")
        rounded.squares[part] = inner_products(numbers, numbers)
        rows -= numbers * scales[:, None]
        rounded.left_out[part] = inner_products(rows, rows)
        rounded.offsets[part] = rows_BD[part] @ shift_D


def quantized(rows_BD: Embeddings, levels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns whole numbers of at most `levels` in size, and the scale of each row."""
    largest = np.maximum(rows_BD.max(axis=1), -rows_BD.min(axis=1))
    scales = np.maximum(largest / np.float32(levels), TINY)
    numbers = rows_BD / scales[:, None]
    return np.rint(numbers, out=numbers), scales
