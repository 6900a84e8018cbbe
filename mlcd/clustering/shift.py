"""The mean of the centers, which is subtracted before products are rounded.

The order of a row's centers c by x.(c - m) is that by x.c, since x.m is one number for all of them.
The nearer the centers are to m, the less their rounding matters.

Shapes: B rows, K centers, D dimension.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.types import Embeddings

_BLOCK_CENTERS: Final = 4096


def mean_of(centers_KD: Embeddings) -> NDArray[np.float32]:
    """Returns the mean of the centers, [D]; zero where there are none."""
    total_D = np.zeros(centers_KD.shape[1])
    for start in range(0, len(centers_KD), _BLOCK_CENTERS):
        total_D += centers_KD[start : start + _BLOCK_CENTERS].sum(axis=0, dtype=np.float64)
    return (total_D / max(1, len(centers_KD))).astype(np.float32)


def shifted(rows_BD: Embeddings, shift_D: NDArray[np.float32]) -> Embeddings:
    """Returns the rows less the shift, in float32: a new array."""
    return rows_BD - shift_D
