"""Inner products of rows and centers, block by block, in an arithmetic whose error is known.

The scan needs only the entries of each row that exceed a threshold. Each arithmetic finds them
where its products lie, and looks at the maxima of groups first, so that selection costs little
beside the matrix product.

Shapes: B rows of a batch, C centers of a block, D dimension, G groups.
"""

import threading
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.types import Embeddings

_GROUP: Final = 64  # entries in a group; its maximum is compared before they are


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

    def multiply(self, rows: Any, start: int, stop: int) -> Any:
        """Returns the [B, C] products with centers[start:stop]; the next call may
        overwrite them.
        """
        ...

    def kth_best_bound(self, product_BC: Any, k: int) -> NDArray[np.float32]:
        """Returns a value for each row, [B], that is at most its k-th largest product and mostly
        close to it; k is at most C.
        """
        ...

    def above(self, product_BC: Any, threshold_B: NDArray[np.float32]) -> Hits:
        """Returns every product greater than its row's threshold."""
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

    def kth_best_bound(self, product_BC: NDArray[np.float32], k: int) -> NDArray[np.float32]:
        # k groups hold a product as large as the k-th of their maxima, and there are few maxima to
        # sort.
        maxima_BG = _grouped(product_BC).max(axis=1, initial=-np.inf)
        entries = maxima_BG if maxima_BG.shape[1] >= k else product_BC
        index = entries.shape[1] - k
        best: NDArray[np.float32] = np.partition(entries, index, axis=1)[:, index]
        return best

    def above(self, product_BC: NDArray[np.float32], threshold_B: NDArray[np.float32]) -> Hits:
        entries_BEG = _grouped(product_BC)
        num_groups = entries_BEG.shape[2]
        grouped = num_groups * _GROUP
        rows, groups = np.nonzero(entries_BEG.max(axis=1, initial=-np.inf) > threshold_B[:, None])
        entries = entries_BEG[rows, :, groups]
        hit, member = np.nonzero(entries > threshold_B[rows, None])
        rest_rows, rest_columns = np.nonzero(product_BC[:, grouped:] > threshold_B[:, None])
        return Hits(
            np.concatenate([rows[hit], rest_rows]),
            np.concatenate([groups[hit] + member * num_groups, rest_columns + grouped]),
            np.concatenate([entries[hit, member], product_BC[rest_rows, rest_columns + grouped]]),
        )


def _grouped(product_BC: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the products as [B, _GROUP, G].

    Group g holds the columns g, g + G, g + 2 G, …, so that maxima run along contiguous memory.
    """
    num_groups = product_BC.shape[1] // _GROUP
    return product_BC[:, : num_groups * _GROUP].reshape(len(product_BC), _GROUP, num_groups)
