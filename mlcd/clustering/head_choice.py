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
# In multiplications of eight bits, by timings of two kinds of data on an AVX2 core: to look through
# one product; one of float32, by which a row's head is made; and, for each component, a pair that
# is kept for a while and one that is scored in the end.
_EACH_PRODUCT: Final = 128
_EACH_OF_HEAD: Final = 2
_EACH_KEPT: Final = 4
_EACH_SCORED: Final = 30


def promising_components(
    basis: Basis, centers: Embeddings, rows_BD: Embeddings, scores_BL: NDArray[np.float64]
) -> int | None:
    """Returns the number of components that costs least; None where whole products do.

    scores_BL: the scores of each row's answer.
    """
    num_centers, dimension = centers.shape
    sample = centers[:: max(1, num_centers // _SAMPLE_CENTERS)]
    num_each = num_centers / len(sample)
    last_B = scores_BL.min(axis=1)
    # what is known of the last score once the sample is seen
    top = min(scores_BL.shape[1], len(sample))
    known_B = np.partition(rows_BD @ sample.T, -top, axis=1)[:, -top]
    costs = {dimension: num_centers * float(dimension + _EACH_PRODUCT)}
    for share in _SHARES:
        num = int(share * dimension)
        heads = Heads(basis.vectors_DD[:, :num])
        bounds_BK = heads.of(rows_BD) @ heads.of(sample).T
        kept, scored = (
            np.count_nonzero(bounds_BK >= least_B[:, None]) / len(rows_BD) * num_each
            for least_B in (known_B, last_B)
        )
        costs[num] = num_centers * (num + _EACH_PRODUCT)
        costs[num] += dimension * (_EACH_OF_HEAD * num + _EACH_KEPT * kept + _EACH_SCORED * scored)
    best = min(costs, key=costs.__getitem__)
    return None if best == dimension else best
