"""The difference between a product and a score: the bounds by which a scan proves that nothing left
out belongs to its answer.

They are derived in `mlcd.clustering.nearest`. Shapes: B rows of a batch, K centers, D dimension.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.matmul import Matmul
from mlcd.types import Embeddings

# above the error of any float64 inner product of unit rows of a dimension below 4,096
DOUBLE_MARGIN: Final = 1e-12
_BLOCK_CENTERS: Final = 512  # centers whose norms are computed at once


@dataclass(frozen=True)
class Norms:
    """The lengths of centers c and of their rounded values c', in float64.

    largest: C = max |c|. largest_rounded: C' = max |c'|. errors: |c - c'| of each, [K].
    """

    largest: float
    largest_rounded: float
    errors: NDArray[np.float64]

    @classmethod
    def of(cls, centers: Embeddings, matmul: Matmul) -> "Norms":
        of_center = np.zeros((3, len(centers)))
        for start in range(0, len(centers), _BLOCK_CENTERS):
            block = centers[start : start + _BLOCK_CENTERS]
            exact = block.astype(np.float64)
            part = of_center[:, start : start + len(block)]
            part[0] = _lengths(exact)
            if matmul.rounding.inputs:
                rounded = matmul.rounded_centers(block).astype(np.float64)
                part[1], part[2] = _lengths(rounded), _lengths(exact - rounded)
            else:
                part[1] = part[0]
        largest, largest_rounded = of_center[:2].max(axis=1, initial=0.0).tolist()
        return cls(largest, largest_rounded, of_center[2])


@dataclass(frozen=True)
class Slack:
    """The bound on the error of a row's products before their output is rounded.

    of_row: |x - x'| C + g |x'| C', [B]. length: |x'|, [B], by which the error of a center counts.
    """

    of_row: NDArray[np.float64]
    length: NDArray[np.float64]
    errors: NDArray[np.float64]  # [K]

    @classmethod
    def of(cls, z_BD: Embeddings, matmul: Matmul, norms: Norms) -> "Slack":
        exact = z_BD.astype(np.float64)
        growth = z_BD.shape[1] * matmul.rounding.sum_roundoff
        growth /= 1 - growth
        rounded = matmul.rounded(z_BD).astype(np.float64) if matmul.rounding.inputs else exact
        length_B = _lengths(rounded)
        of_row_B = growth * norms.largest_rounded * length_B
        if matmul.rounding.inputs:
            of_row_B += _lengths(exact - rounded) * norms.largest
        return cls(of_row_B, length_B, norms.errors)

    def with_any(self) -> NDArray[np.float64]:
        """Returns the bound for each row and all centers, [B]."""
        bound_B: NDArray[np.float64] = self.of_row + self.length * self.errors.max(initial=0.0)
        return bound_B

    def with_each(self, ids_BM: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the bound for each row and each of its centers, [B, M]."""
        bound_BM: NDArray[np.float64] = (
            self.of_row[:, None] + self.length[:, None] * self.errors[ids_BM]
        )
        return bound_BM


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
