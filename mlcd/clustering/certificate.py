"""What separates a product from a score: the bounds by which a scan proves that nothing left out belongs to its answer.

Derived in `mlcd.clustering.nearest`. Shapes: B rows of a batch, K centers, D dimension.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.matmul import Products
from mlcd.types import Embeddings

DOUBLE_MARGIN: Final = 1e-12  # above the error of any float64 inner product of unit rows below a dimension of 4,096
_BLOCK_CENTERS: Final = 8192  # measured at once

Norms = tuple[float, float, float]


def largest_norms(centers: Embeddings, products: Products) -> Norms:
    """(C, C', R), in float64."""
    largest = np.zeros(3)
    for start in range(0, len(centers), _BLOCK_CENTERS):
        block = centers[start : start + _BLOCK_CENTERS].astype(np.float64)
        rounded = products.rounded(centers[start : start + _BLOCK_CENTERS]).astype(np.float64)
        norms = [np.linalg.norm(rows, axis=1).max() for rows in (block, rounded, block - rounded)]
        largest = np.maximum(largest, norms)
    return float(largest[0]), float(largest[1]), float(largest[2])


def score_slack(z_BD: Embeddings, products: Products, norms: Norms) -> NDArray[np.float64]:
    """|x - x'| C + |x'| R + g |x'| C' of each row: what its products may be off by before their output is rounded."""
    exact = z_BD.astype(np.float64)
    growth = z_BD.shape[1] * products.rounding.sum_roundoff
    growth /= 1 - growth
    if not products.rounding.inputs:  # x' = x, so that R = 0 too
        slack: NDArray[np.float64] = growth * norms[1] * _lengths(exact)
        return slack
    rounded = products.rounded(z_BD).astype(np.float64)
    of_rounded = _lengths(rounded)
    slack = _lengths(exact - rounded) * norms[0] + of_rounded * norms[2]
    slack += growth * of_rounded * norms[1]
    return slack


def _lengths(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths: NDArray[np.float64] = np.sqrt(np.einsum("bd,bd->b", rows, rows))
    return lengths


def raised(products: NDArray[np.float64], output: float) -> NDArray[np.float64]:
    """U(a) = a + b |a|: the most that a product stored as `a` can have been."""
    return products + output * _finite_size(products) if output else products


def lowered(products: NDArray[np.float64], output: float) -> NDArray[np.float64]:
    """The least that a product stored as `a` can have been."""
    return products - output * _finite_size(products) if output else products


def _finite_size(products: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isneginf(products), 0.0, np.abs(products))


def beyond_reach(score_B: NDArray[np.float64], slack_B: NDArray[np.float64], output: float) -> NDArray[np.float32]:
    """The threshold at or below which no product can belong to a center that reaches this score."""
    bound_B = score_B - 2 * DOUBLE_MARGIN - slack_B
    # U(t) = t + b |t| <= bound, solved for t; one step of float32 lower, for the rounding of t itself.
    threshold_B = np.where(bound_B >= 0, bound_B / (1 + output), bound_B / (1 - output))
    lower: NDArray[np.float32] = np.nextafter(threshold_B.astype(np.float32), np.float32(-np.inf))
    return lower


@dataclass(frozen=True)
class Reach:
    """What the `top` best products seen say of those to come."""

    top: int
    slack: NDArray[np.float64]  # [B]
    output: float

    def threshold(self, rows: NDArray[np.int64], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of these rows, by their products seen, [rows, >= top]: what no product of the answer is at or below."""
        last = np.partition(scores, -self.top, axis=1)[:, -self.top].astype(np.float64)
        slack = self.slack[rows]
        return beyond_reach(lowered(last, self.output) - slack, slack, self.output)
