"""Computes inner products of rows and centers, block by block, with a known error bound.

Shapes: B rows of a batch, C centers of a block, D dimension, E entries of each of G groups.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.types import Embeddings

# Components of pairs that are scored at once: few enough for the cache, and enough that threads
# rarely wait for the GIL, which each step takes.
_AT_ONCE: Final = 1 << 18
_GROUP: Final = 16  # entries in a group; only the largest is compared
_MIN_GROUPS_PER_RESULT: Final = 2  # groups are used from this many per requested entry on
_SUMMED: Final = 4096  # centers at once
_UNDERFLOW: Final = 2.0**-63  # components below this may have squares that underflow in float32


@dataclass(frozen=True)
class Rounding:
    """The rounding that separates a computed product from the exact one.

    inputs: whether the inputs are rounded. sum_roundoff: unit roundoff of the sum.
    """

    inputs: bool
    sum_roundoff: float


@dataclass(frozen=True)
class Loaded:
    """Rows x prepared for multiplication.

    data: input of `multiply`. lengths, errors: upper bounds of |y'| and |y - y'|, where y is a row,
    less the shift if the arithmetic also shifts rows, and y' is its rounded value. offsets: x.m for
    the shift m of the centers. All three are float64 [B].
    """

    data: Any
    lengths: NDArray[np.float64]
    errors: NDArray[np.float64]
    offsets: NDArray[np.float64]


class Sums(NamedTuple):
    """Unscaled products: the product of row b and center c is values[b, c] scales[b] + terms[c].

    All float32: values [B, at least C], row by row in memory; scales [B]; terms [C].
    """

    values: NDArray[np.float32]
    scales: NDArray[np.float32]
    terms: NDArray[np.float32]

    @classmethod
    def of_products(cls, product_BC: NDArray[np.float32]) -> "Sums":
        num_rows, num_centers = product_BC.shape
        return cls(product_BC, np.ones(num_rows, np.float32), np.zeros(num_centers, np.float32))

    def products(self) -> NDArray[np.float32]:
        """Returns the products, [B, C]."""
        product_BC = self.values[:, : len(self.terms)] * self.scales[:, None]
        product_BC += self.terms
        return product_BC


RoundRows: TypeAlias = Callable[..., None]  # see `int8_matmul.round_in_numpy`


class Matmul(Protocol):
    """An arithmetic that multiplies prepared rows by blocks of the centers that it was made for."""

    name: str
    rounding: Rounding

    @property
    def shift(self) -> NDArray[np.float32] | None:
        """Returns m [D], which is subtracted from every center; None for no shift. Products are
        x.(c - m), which order the centers of a row like its scores.
        """
        ...

    def load(self, rows_BD: Embeddings, round_rows: RoundRows | None = None) -> Loaded:
        """Returns the rows in the form that `multiply` takes.

        round_rows: compiled function that rounds the rows; used only if the arithmetic rounds.
        """
        ...

    def rounded_centers(self, centers_CD: Embeddings) -> NDArray[np.floating]:
        """Returns the rounded values of these centers, less the shift."""
        ...

    def multiply(self, rows: Any, start: int, stop: int) -> NDArray[np.float32]:
        """Returns the [B, C] products with centers[start:stop]; the next call may
        overwrite them. start: a multiple of the arithmetic's block size.
        """
        ...

    def sums(self, rows: Any, start: int, stop: int) -> Sums:
        """Returns the products of `multiply`, unscaled."""
        ...


def pairs_at_once(dimension: int) -> int:
    """Returns the number of pairs to score at once."""
    return max(1, _AT_ONCE // max(1, dimension))


def single_scores(
    z_BD: Embeddings, centers: Embeddings, rows: NDArray[np.int64], columns: NDArray[np.integer]
) -> NDArray[np.float32]:
    """Returns the float32 score of each (row, center) pair, a few times faster than the exact
    score.
    """
    scores, at_once = np.empty(len(rows), dtype=np.float32), pairs_at_once(z_BD.shape[1])
    of_centers, of_rows = np.empty((2, min(at_once, len(rows)), z_BD.shape[1]), np.float32)
    for start in range(0, len(rows), at_once):
        part = slice(start, min(start + at_once, len(rows)))
        num = part.stop - part.start
        np.take(centers, columns[part], axis=0, out=of_centers[:num], mode="clip")
        np.take(z_BD, rows[part], axis=0, out=of_rows[:num], mode="clip")
        scores[part] = inner_products(of_rows[:num], of_centers[:num])
    return scores


class NumpyMatmul:
    """The float32 arithmetic of numpy's BLAS; it needs no other package."""

    name = "numpy fp32"
    rounding = Rounding(inputs=False, sum_roundoff=2.0**-24)
    shift = None

    def __init__(self, centers_KD: Embeddings) -> None:
        self._centers_KD = centers_KD
        self._memory = threading.local()  # one scan may serve several threads

    def load(self, rows_BD: Embeddings, _: RoundRows | None = None) -> Loaded:
        return Loaded(rows_BD, lengths(rows_BD), np.zeros(len(rows_BD)), np.zeros(len(rows_BD)))

    def rounded_centers(self, centers_CD: Embeddings) -> NDArray[np.floating]:
        return centers_CD

    def multiply(self, rows: Embeddings, start: int, stop: int) -> NDArray[np.float32]:
        shape = (len(rows), stop - start)
        return np.matmul(
            rows,
            self._centers_KD[start:stop].T,
            out=self._buffer(shape[0] * shape[1]).reshape(shape),
        )

    def _buffer(self, size: int) -> NDArray[np.float32]:
        """Returns reused memory: new pages for every block would cost a tenth of the product."""
        buffer: NDArray[np.float32] | None = getattr(self._memory, "held", None)
        if buffer is None or len(buffer) < size:
            buffer = self._memory.held = np.empty(size, dtype=np.float32)
        return buffer[:size]

    def sums(self, rows: Embeddings, start: int, stop: int) -> Sums:
        return Sums.of_products(self.multiply(rows, start, stop))


def reached_by(values_BC: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    """Returns a value for each row that at least k of its entries reach, [B].

    It is the k-th largest of the maxima of groups: few maxima are sorted faster than many values.
    """
    num_groups = values_BC.shape[1] // _GROUP
    if num_groups >= _MIN_GROUPS_PER_RESULT * k:
        # Group g holds the columns g, g + G, …, so that maxima run along contiguous memory.
        grouped_BEG = values_BC[:, : num_groups * _GROUP].reshape(-1, _GROUP, num_groups)
        values_BC = grouped_BEG.max(axis=1)
    least_B: NDArray[np.float32] = np.partition(values_BC, -k, axis=1)[:, -k]
    return least_B


def ranks(rows: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """Returns the rank of each entry among the entries of its row. rows: ascending row ids."""
    num_each = np.bincount(rows, minlength=num_rows)
    firsts = np.cumsum(num_each) - num_each
    rank: NDArray[np.int64] = np.arange(len(rows)) - firsts[rows]
    return rank


def mean_of(centers_KD: Embeddings) -> NDArray[np.float32]:
    """Returns the mean of the centers, [D]; zero if there are none.

    It is subtracted before rounding: the nearer the centers are to it, the smaller is the error.
    """
    total_D = np.zeros(centers_KD.shape[1])
    for start in range(0, len(centers_KD), _SUMMED):
        total_D += centers_KD[start : start + _SUMMED].sum(axis=0, dtype=np.float64)
    return (total_D / max(1, len(centers_KD))).astype(np.float32)


def lengths(rows_BD: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns an upper bound of the length of each row, [B]."""
    return lengths_of(inner_products(rows_BD, rows_BD), rows_BD.shape[1])


def lengths_of(squares_B: NDArray[np.float32], dimension: int) -> NDArray[np.float64]:
    """Returns upper bounds of lengths, [B]: the roots of float32 sums of `dimension` squares, plus
    the error of these sums.
    """
    bound_B: NDArray[np.float64] = np.sqrt(squares_B.astype(np.float64))
    bound_B *= 1 + dimension * 2.0**-23
    bound_B += dimension * _UNDERFLOW
    return bound_B


def entries_above(
    values_BC: NDArray[np.number], threshold_B: NDArray[np.number]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the rows and columns of the entries greater than their row's threshold."""
    flat: NDArray[np.int64] = np.flatnonzero(values_BC > threshold_B[:, None])
    rows: NDArray[np.int64] = flat // values_BC.shape[1]
    return rows, flat - rows * values_BC.shape[1]


def inner_products(
    first_BD: NDArray[np.float32], second_BD: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Returns the float32 inner product of each pair of rows, [B]."""
    if hasattr(np, "vecdot"):
        products_B: NDArray[np.float32] = np.vecdot(first_BD, second_BD)
        return products_B
    # NumPy 1, used with the Triton server's Python
    summed_B: NDArray[np.float32] = np.einsum("bd,bd->b", first_BD, second_BD)
    return summed_B
