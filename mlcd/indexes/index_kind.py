"""The kinds of indexes and their sizes, without importing faiss, which is slow to import."""

from typing import Final, Literal

import numpy as np

# hnsw: a graph over float32 vectors. ivf-sq8: cells, one byte per dimension. ivf-pq: cells over
# rotated vectors, one byte per four dimensions.
Kind = Literal["flat", "hnsw", "ivf-sq8", "ivf-pq"]

# faiss recommends at least 39; more rows barely change the cells.
TRAINING_ROWS_PER_CELL: Final = 64
_SMALLEST_CELLS: Final = 16
_LARGEST_CELLS: Final = 65_536
_PRODUCT_CODES: Final = 256


def num_cells(num_rows: int) -> int:
    """Returns the power of two nearest to 4 * sqrt(rows), as faiss advises: 4,096 for a million
    rows; less if `num_rows` would not suffice to train them.
    """
    cells = 2 ** round(np.log2(max(1.0, 4 * num_rows**0.5)))
    max_trainable = max(1, num_rows // TRAINING_ROWS_PER_CELL)
    return int(min(max(_SMALLEST_CELLS, cells), _LARGEST_CELLS, max_trainable))


def training_rows(kind: Kind, num_rows: int) -> int:
    """Returns the sample size for `FaissIndex.train`."""
    if kind in ("flat", "hnsw"):
        return 1
    return min(num_rows, max(num_cells(num_rows), _PRODUCT_CODES) * TRAINING_ROWS_PER_CELL)
