"""The number of components by which heads may rule centers out for less than whole products cost.

It is estimated on some rows and a sample of the centers: the fewer components, the shorter the
products, and the more centers are left. A timing decides afterwards whether it is used.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.arithmetics import BLOCK_CENTERS
from mlcd.clustering.bounding_products import HeadProducts, upper_bounds
from mlcd.clustering.certified_scan import CertifiedScan
from mlcd.clustering.heads import Basis
from mlcd.types import Embeddings

_SHARES: Final = (0.125, 0.1875, 0.25, 0.3, 0.4, 0.5)  # of the components
# In multiplications of eight bits, by timings on an AVX2 core: to look through one product; one of
# float32, by which a row's head is made; and to score a pair, for each component.
_EACH_PRODUCT: Final = 48
_EACH_OF_HEAD: Final = 2
_EACH_SCORED: Final = 20


def promising_components(
    scan: CertifiedScan,
    basis: Basis,
    rows_BD: Embeddings,
    scores_BL: NDArray[np.float64],
    most_held: int,
) -> int | None:
    """Returns the number of components that costs least; None where whole products do.

    scan: that of whole vectors. scores_BL: the scores of each row's answer. most_held: centers of a
    row that need not be scored before all are seen.
    """
    num_centers, dimension = scan.centers.shape
    sample = scan.centers[:: -(-num_centers // BLOCK_CENTERS)]
    top = min(scores_BL.shape[1], len(sample))
    # of the last of an answer, once all are seen, and once the first block is
    last_B1 = scores_BL.min(axis=1, keepdims=True)
    known_B1 = np.partition(rows_BD @ sample.T, -top, axis=1)[:, -top, None]
    costs = {dimension: num_centers * float(dimension + _EACH_PRODUCT)}
    for share in _SHARES:
        num = int(share * dimension)
        bounds_BK = upper_bounds(HeadProducts(scan.name, sample, basis, num), rows_BD)
        num_each = num_centers / len(sample)
        in_the_end_B, at_first_B = (
            num_each * np.count_nonzero(bounds_BK >= least_B1, axis=1)
            for least_B1 in (last_B1, known_B1)
        )
        num_scored = in_the_end_B + np.maximum(at_first_B - most_held, 0)
        costs[num] = num_centers * (num + _EACH_PRODUCT)
        costs[num] += dimension * (_EACH_OF_HEAD * num + _EACH_SCORED * num_scored.mean())
    best = min(costs, key=costs.__getitem__)
    return None if best == dimension else best
