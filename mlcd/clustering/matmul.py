"""Inner products of rows and centers, block by block, in an arithmetic whose error is known.

The scan needs only the entries of each row that exceed a threshold. Each arithmetic finds them
where its products lie.

Shapes: B rows of a batch, C centers of a block, D dimension, E entries of each of G groups.
"""

import threading
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.types import Embeddings

_GROUP: Final = 64  # entries in a group, of which only the largest may lead


@dataclass(frozen=True)
class Rounding:
    """The rounding that separates a computed product from the exact one.

    inputs: true where the inputs are rounded. sum_roundoff: the unit roundoff of the sum. output:
    that of the result.
    """

    inputs: bool
    sum_roundoff: float
    output: float


@dataclass(frozen=True)
class Hits:
    """The entries above a threshold: rows and columns int64, scores float32, all [hits]."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    scores: NDArray[np.float32]


class Matmul(Protocol):
    """An arithmetic that multiplies prepared rows by blocks of the centers that it was made for."""

    name: str
    rounding: Rounding

    def load(self, rows_BD: Embeddings) -> Any:
        """Returns the rows in the form that `multiply` takes."""
        ...

    def rounded(self, rows_BD: Embeddings) -> NDArray[np.floating]:
        """Returns the values that loading makes of the rows; their difference from `rows_BD` enters
        the error bound.
        """
        ...

    def rounded_centers(self, centers_CD: Embeddings) -> NDArray[np.floating]:
        """Returns the values that the arithmetic makes of some of its centers."""
        ...

    def multiply(self, rows: Any, start: int, stop: int) -> Any:
        """Returns the [B, C] products with centers[start:stop]; the next call may
        overwrite them. start: a multiple of the block that the arithmetic was made for.
        """
        ...

    def leaders(self, product_BC: Any, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Returns k different columns for each row, mostly those of its largest products, and these
        products: [B, k] each; k is at most C.
        """
        ...

    def above(self, product_BC: Any, threshold_B: NDArray[np.float32]) -> Hits:
        """Returns every product greater than its row's threshold, and few others."""
        ...


class NumpyMatmul:
    """The float32 arithmetic of numpy's BLAS; it needs no other package."""

    name = "numpy fp32"
    rounding = Rounding(inputs=False, sum_roundoff=2.0**-24, output=0.0)

    def __init__(self, centers_KD: Embeddings) -> None:
        self._centers_KD = centers_KD
        self._memory = threading.local()  # one scan may serve several threads

    def load(self, rows_BD: Embeddings) -> Embeddings:
        return rows_BD

    def rounded(self, rows_BD: Embeddings) -> NDArray[np.floating]:
        return rows_BD

    def rounded_centers(self, centers_CD: Embeddings) -> NDArray[np.floating]:
        return self.rounded(centers_CD)

    def multiply(self, rows: Embeddings, start: int, stop: int) -> NDArray[np.float32]:
        shape = (len(rows), stop - start)
        return np.matmul(
            rows,
            self._centers_KD[start:stop].T,
            out=self._buffer(shape[0] * shape[1]).reshape(shape),
        )

    def _buffer(self, size: int) -> NDArray[np.float32]:
        """Returns memory that is reused: fresh pages for every block would cost a tenth of the
        product.
        """
        held: NDArray[np.float32] | None = getattr(self._memory, "held", None)
        if held is None or len(held) < size:
            held = self._memory.held = np.empty(size, dtype=np.float32)
        return held[:size]

    def leaders(
        self, product_BC: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return leading_entries(product_BC, k)

    def above(self, product_BC: NDArray[np.float32], threshold_B: NDArray[np.float32]) -> Hits:
        rows, columns = entries_above(product_BC, threshold_B)
        return Hits(rows, columns, product_BC[rows, columns])


def leading_entries(
    values_BC: NDArray[np.float32], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Returns k different columns of each row and their values, [B, k]: the largest of the groups
    that hold the largest, as few maxima are sorted faster than many values.
    """
    num_groups = values_BC.shape[1] // _GROUP
    columns: NDArray[np.int64]
    if num_groups < k:
        columns = np.argpartition(values_BC, -k, axis=1)[:, -k:]
    else:
        # Group g holds the columns g, g + G, …, so that maxima run along contiguous memory.
        grouped_BEG = values_BC[:, : num_groups * _GROUP].reshape(-1, _GROUP, num_groups)
        groups = np.argpartition(grouped_BEG.max(axis=1), -k, axis=1)[:, -k:]
        members = grouped_BEG[np.arange(len(values_BC))[:, None], :, groups].argmax(axis=2)
        columns = groups + num_groups * members
    return columns, np.take_along_axis(values_BC, columns, axis=1)


def entries_above(
    values_BC: NDArray[np.number], threshold_B: NDArray[np.number]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the rows and columns of the entries greater than their row's threshold."""
    flat: NDArray[np.int64] = np.flatnonzero(values_BC > threshold_B[:, None])
    rows: NDArray[np.int64] = flat // values_BC.shape[1]
    return rows, flat - rows * values_BC.shape[1]
