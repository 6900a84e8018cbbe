"""The number of components by which heads may rule centers out for less than whole products cost.

It is estimated on some rows and a sample of the centers: the fewer components, the shorter the
products, and the more centers are left. A timing decides afterwards whether it is used.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.heads import Basis, Heads
from mlcd.types import Embeddings

_SHARES: Final = (0.125, 0.1875, 0.25, 0.3, 0.4, 0.5)  # of the components
_SAMPLE_CENTERS: Final = 4096
# In multiplications of the arithmetic: what a product costs besides, to be looked through; what one
# in float32 costs, by which a row's head is made; and a component of a center that is left.
_EACH_CENTER: Final = 128
_EACH_OF_HEAD: Final = 2
_EACH_LEFT: Final = 20
_WORTH_A_TRY: Final = 0.9  # of the cost of whole products


def promising_components(
    basis: Basis, centers: Embeddings, rows_BD: Embeddings, last_B: NDArray[np.float64]
) -> int | None:
    """Returns the number of components that costs least; None where whole products do.

    last_B: the last score of the answer of each row.
    """
    num_centers, dimension = centers.shape
    sample = centers[:: max(1, num_centers // _SAMPLE_CENTERS)]
    costs = {dimension: _WORTH_A_TRY * num_centers * (dimension + _EACH_CENTER)}
    for share in _SHARES:
        num = int(share * dimension)
        heads = Heads(basis.vectors_DD[:, :num])
        bounds_BK = heads.of(rows_BD) @ heads.of(sample).T
        left = float(np.mean(bounds_BK >= last_B[:, None])) * num_centers
        costs[num] = num_centers * (num + _EACH_CENTER)
        costs[num] += dimension * (_EACH_OF_HEAD * num + _EACH_LEFT * left)
    best = min(costs, key=costs.__getitem__)
    return None if best == dimension else best
