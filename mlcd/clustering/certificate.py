"""Bounds the difference between products and scores, so that a scan can prove its answer complete.

The bounds are derived in `mlcd.clustering.nearest`. Shapes: B rows of a batch, K centers, D
dimension.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.matmul import Loaded, Matmul, Rounding
from mlcd.types import Embeddings

# extra error of comparing bounds in float64, for scores of about 1
DOUBLE_MARGIN: Final = 1e-12
_BLOCK_CENTERS: Final = 512  # centers whose norms are computed at once
ROOM: Final = 2.0**126  # float32 ends at 2^128
_SINGLE, _DOUBLE = 2.0**-24, 2.0**-53  # unit roundoffs
# float64 errors in one comparison: one of the omitted score, and two of the score it is compared
# with, which may have been summed in another order.
_ERRORS_COMPARED: Final = 3


@dataclass(frozen=True)
class Norms:
    """The lengths of shifted centers d = c - m and of their rounded values d', in float64.

    lengths: |d| of each, [K]. largest: max |d|. largest_rounded: max |d'|. errors: |d - d'| of
    each, [K]. largest_error: max |d - d'|. shift: |m|. dimension: D.
    """

    lengths: NDArray[np.float64]
    largest: float
    largest_rounded: float
    errors: NDArray[np.float64]
    largest_error: float
    shift: float
    dimension: int

    @classmethod
    def of(cls, centers: Embeddings, matmul: Matmul) -> "Norms":
        of_center = np.zeros((3, len(centers)))
        shift_D = np.zeros(centers.shape[1]) if matmul.shift is None else matmul.shift
        shift_D = shift_D.astype(np.float64)
        for start in range(0, len(centers), _BLOCK_CENTERS):
            block = centers[start : start + _BLOCK_CENTERS]
            exact = block - shift_D
            part = of_center[:, start : start + len(block)]
            part[0] = _lengths(exact)
            if matmul.rounding.inputs:
                rounded = matmul.rounded_centers(block).astype(np.float64)
                part[1], part[2] = _lengths(rounded), _lengths(exact - rounded)
            else:
                part[1] = part[0]
        return cls.of_each(of_center, float(np.linalg.norm(shift_D)), centers.shape[1])

    @classmethod
    def of_each(cls, lengths_3K: NDArray[np.float64], shift: float, dimension: int) -> "Norms":
        """Returns the norms. lengths_3K: |d|, |d'| and |d - d'| of each center, [3, K]."""
        largest, largest_rounded, largest_error = lengths_3K.max(axis=1, initial=0.0).tolist()
        lengths_K, _, errors_K = lengths_3K
        return cls(lengths_K, largest, largest_rounded, errors_K, largest_error, shift, dimension)

    def longest(self) -> float:
        """Returns an upper bound of |c| for all centers."""
        return self.largest + self.shift


@dataclass(frozen=True)
class Slack:
    """The bound on the error of a row's products.

    row_error: the part of the bound that is equal for all centers, [B]; the rest is
    |y - y'| |d| + |y'| |d - d'|. length, error: |y'| and |y - y'|, [B]. row: upper bound of |x| and
    |y'|, [B]. offset: x.m, by which scores exceed products, [B].
    """

    row_error: NDArray[np.float64]
    length: NDArray[np.float64]
    error: NDArray[np.float64]
    row: NDArray[np.float64]
    offset: NDArray[np.float64]
    norms: Norms

    @classmethod
    def of(cls, rows: Loaded, rounding: Rounding, norms: Norms) -> "Slack":
        # Few steps, each over all rows: between two steps another thread may take the GIL.
        row_B = rows.lengths + rows.errors + norms.shift
        single = _growth(norms.dimension, _SINGLE)
        double = _ERRORS_COMPARED * _growth(norms.dimension, _DOUBLE)
        growth = _growth(norms.dimension, rounding.sum_roundoff)
        row_error_B = rows.lengths * (growth * norms.largest_rounded)
        # the offset x.m and the terms m.d in float32, and scores in float64
        row_error_B += row_B * (single * norms.shift + double * norms.longest())
        row_error_B += 4 * _SINGLE * norms.shift * norms.largest
        return cls(row_error_B, rows.lengths, rows.errors, row_B, rows.offsets, norms)

    def single(self) -> NDArray[np.float64]:
        """Returns the bound on the error of any score in float32, [B]."""
        dimension = self.norms.dimension
        growth = _growth(dimension, _SINGLE) + _ERRORS_COMPARED * _growth(dimension, _DOUBLE)
        single_B: NDArray[np.float64] = self.row * (growth * self.norms.longest())
        return single_B

    def summation_error(self) -> NDArray[np.float64]:
        """Returns the largest difference of two scores that the order of float64 summation can
        cause, [B].
        """
        return _summation_error(self.row, self.norms.longest(), self.norms.dimension)

    @cached_property
    def max_error(self) -> NDArray[np.float64]:
        """Returns the largest bound of each row, which holds for all centers, [B]."""
        bound_B: NDArray[np.float64] = self.row_error + self.error * self.norms.largest
        bound_B += self.length * self.norms.largest_error
        return bound_B

    def holds(self) -> NDArray[np.bool_]:
        """Returns a mask [B] of the rows for which no float32 sum of products can overflow.

        This includes the products with the shift. Without it the bounds do not apply.
        """
        norms = self.norms
        room_B = self.row * max(norms.largest_rounded, norms.shift) < ROOM
        return room_B & (self.max_error < ROOM) & (norms.shift * norms.largest < ROOM)

    def of_pairs(self, rows: NDArray[np.int64], ids: NDArray[np.integer]) -> NDArray[np.float64]:
        """Returns the bound for each pair of a row and a center."""
        bound: NDArray[np.float64] = self.error[rows] * self.norms.lengths[ids]
        bound += self.length[rows] * self.norms.errors[ids] + self.row_error[rows]
        return bound


def _summation_error(
    length_B: NDArray[np.float64], longest: float, dimension: int
) -> NDArray[np.float64]:
    """Returns `Slack.summation_error`.

    length_B: upper bound of |x| of each row. longest: upper bound of |c|.
    """
    error_B: NDArray[np.float64] = length_B * (4 * _growth(dimension, _DOUBLE) * longest)
    return error_B


def double_error(rows_BD: Embeddings, norms: Norms) -> NDArray[np.float64]:
    """Returns `Slack.summation_error` for these rows, [B].

    norms: of centers without a shift.
    """
    lengths_B = _lengths(rows_BD.astype(np.float64))
    return _summation_error(lengths_B, norms.largest, norms.dimension)


def _growth(num_terms: int, roundoff: float) -> float:
    return num_terms * roundoff / (1 - num_terms * roundoff)


def _lengths(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths: NDArray[np.float64] = np.sqrt(np.einsum("bd,bd->b", rows, rows))
    return lengths


def beyond_reach(score_B: NDArray[np.float64], slack_B: NDArray[np.float64]) -> NDArray[np.float32]:
    """Returns a threshold [B]: a center whose product is not above it cannot reach this score.

    The threshold is one float32 step below the rounded bound.
    """
    bound_B = score_B - 2 * DOUBLE_MARGIN - slack_B
    lower: NDArray[np.float32] = np.nextafter(bound_B.astype(np.float32), np.float32(-np.inf))
    return lower
