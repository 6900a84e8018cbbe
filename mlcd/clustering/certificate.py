"""The difference between a product and a score: the bounds by which a scan proves that nothing left
out belongs to its answer.

They are derived in `mlcd.clustering.nearest`. Shapes: B rows of a batch, K centers, D dimension.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.matmul import Matmul
from mlcd.types import Embeddings

# above the error of any float64 inner product of unit rows of a dimension below 4,096
DOUBLE_MARGIN: Final = 1e-12
_BLOCK_CENTERS: Final = 512  # centers whose norms are computed at once

Norms = tuple[float, float, float]


def largest_norms(centers: Embeddings, matmul: Matmul) -> Norms:
    """Returns (C, C', R) of `mlcd.clustering.nearest`, in float64."""
    largest = np.zeros(3)
    for start in range(0, len(centers), _BLOCK_CENTERS):
        block = centers[start : start + _BLOCK_CENTERS].astype(np.float64)
        rounded = matmul.rounded_centers(centers[start : start + _BLOCK_CENTERS]).astype(np.float64)
        norms = [np.linalg.norm(rows, axis=1).max() for rows in (block, rounded, block - rounded)]
        largest = np.maximum(largest, norms)
    return float(largest[0]), float(largest[1]), float(largest[2])


def score_slack(z_BD: Embeddings, matmul: Matmul, norms: Norms) -> NDArray[np.float64]:
    """Returns |x - x'| C + |x'| R + g |x'| C' of each row, [B].

    This bounds the error of the row's products before their output is rounded.
    """
    exact = z_BD.astype(np.float64)
    growth = z_BD.shape[1] * matmul.rounding.sum_roundoff
    growth /= 1 - growth
    if not matmul.rounding.inputs:  # x' = x, so that R = 0 too
        slack: NDArray[np.float64] = growth * norms[1] * _lengths(exact)
        return slack
    rounded = matmul.rounded(z_BD).astype(np.float64)
    of_rounded = _lengths(rounded)
    slack = _lengths(exact - rounded) * norms[0] + of_rounded * norms[2]
    slack += growth * of_rounded * norms[1]
    return slack


def _lengths(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths: NDArray[np.float64] = np.sqrt(np.einsum("bd,bd->b", rows, rows))
    return lengths


def raised(products: NDArray[np.float64], output: float) -> NDArray[np.float64]:
    """Returns U(a) = a + b |a|: the largest value that a product stored as `a` can have had."""
    return products + output * _finite_size(products) if output else products


def lowered(products: NDArray[np.float64], output: float) -> NDArray[np.float64]:
    """Returns the smallest value that a product stored as `a` can have had."""
    return products - output * _finite_size(products) if output else products


def _finite_size(products: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isneginf(products), 0.0, np.abs(products))


def beyond_reach(
    score_B: NDArray[np.float64], slack_B: NDArray[np.float64], output: float
) -> NDArray[np.float32]:
    """Returns the threshold at or below which no product belongs to a center that reaches this
    score.
    """
    bound_B = score_B - 2 * DOUBLE_MARGIN - slack_B
    # U(t) = t + b |t| <= bound, solved for t. The result is one step of float32 lower, because t
    # itself is rounded.
    threshold_B = np.where(bound_B >= 0, bound_B / (1 + output), bound_B / (1 - output))
    lower: NDArray[np.float32] = np.nextafter(threshold_B.astype(np.float32), np.float32(-np.inf))
    return lower
