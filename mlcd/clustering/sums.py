"""Sums of rows per cluster that do not depend on the order of addition.

A component is rounded to a multiple of 2^-33 and added as int64, so any order, batch size, number
of threads or of processes gives the same bits. The error is 2^-34 per component and row. A cluster
may contain 2^29 rows before a sum of components of size 1 could overflow.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.row_threads import batches, in_threads
from mlcd.clustering.rows import Rows
from mlcd.errors import InvalidInput
from mlcd.types import Embeddings
from mlcd.world import World

SCALE: Final = 2.0**33
MAX_ROWS: Final = 2**29
_TOGETHER: Final = 1 << 17  # components converted at once: small enough for the cache
_WORTH_THREADS: Final = 1 << 20  # components: 3 ms on one core; two threads start in 0.5 ms
_LEAST_COLUMNS: Final = 32  # columns per thread: narrower slices share cache lines
_CONVERTED: Final = 1 << 20  # components per thread at once in float64; four copies exist
_ROWS_OF_A_MEAN: Final = 2**28


class ClusterSums:
    """The sum of the rows and the number of rows of each cluster.

    sums: [K, D] int64, in units of 2^-33. sizes: [K] int64.
    """

    def __init__(self, sums: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        self.sums, self.sizes = sums, sizes

    @classmethod
    def zeros(cls, num_clusters: int, dimension: int) -> "ClusterSums":
        return cls(
            np.zeros((num_clusters, dimension), dtype=np.int64),
            np.zeros(num_clusters, dtype=np.int64),
        )

    def check(self) -> "ClusterSums":
        """Returns itself. Raises InvalidInput for a cluster whose sum could have overflowed."""
        if self.sizes.max(initial=0) > MAX_ROWS:
            raise InvalidInput(
                f"a cluster holds more than {MAX_ROWS} rows",
                remedy="ask for more clusters, or cluster a sample",
            )
        return self

    def add(self, rows: Embeddings, clusters: NDArray[np.integer]) -> None:
        self._change(rows, clusters, 1)

    def subtract(self, rows: Embeddings, clusters: NDArray[np.integer]) -> None:
        self._change(rows, clusters, -1)

    def _change(self, rows: Embeddings, clusters: NDArray[np.integer], sign: int) -> None:
        self.sizes += sign * np.bincount(clusters, minlength=len(self.sizes))
        self.check()
        order = np.argsort(clusters, kind="stable")

        def change(columns: slice) -> None:
            self._change_columns(rows[:, columns], clusters, order, sign, self.sums[:, columns])

        if rows.size >= _WORTH_THREADS:
            in_threads(change, batches(rows.shape[1], most=rows.shape[1], least=_LEAST_COLUMNS))
        else:
            change(slice(None))

    @staticmethod
    def _change_columns(
        rows: Embeddings,
        clusters: NDArray[np.integer],
        order: NDArray[np.int64],
        sign: int,
        sums: NDArray[np.int64],
    ) -> None:
        """Adds the rows to the sums in place. order: rows sorted by cluster."""
        together = max(1, _TOGETHER // rows.shape[1])
        for start in range(0, len(rows), together):
            part = order[start : start + together]
            ids = clusters[part]
            starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
            fixed = rows[part].astype(np.float64)
            fixed *= sign * SCALE
            np.rint(fixed, out=fixed)
            # These are whole numbers below 2^53, so their sums are exact in float64.
            sums[ids[starts]] += np.add.reduceat(fixed, starts, axis=0).astype(np.int64)

    def objective(self, centers: Embeddings) -> float:
        """Returns J, the mean inner product of the rows with their centers [K, D], in float64, from
        the sums.
        """
        return float(self._products(centers).sum()) / int(self.sizes.sum())

    def cosines(self, centers: Embeddings) -> NDArray[np.float64]:
        """Returns [K] float64: the mean inner product of each center and its rows, NaN for a
        cluster without rows.
        """
        products = self._products(centers)
        return np.divide(
            products, self.sizes, out=np.full_like(products, np.nan), where=self.sizes > 0
        )

    def _products(self, centers: Embeddings) -> NDArray[np.float64]:
        """Returns [K] the inner product of each sum and its center.

        Centers are normalized in float64: the float32 rounding of their lengths exceeds the gain of
        an update if all rows are close to their centers.
        """
        products = np.zeros(len(centers))

        def multiply(part: slice) -> None:
            sums, exact = self.sums[part].astype(np.float64), centers[part].astype(np.float64)
            lengths = np.linalg.norm(exact, axis=1)
            products[part] = np.einsum("kd,kd->k", sums, exact) / SCALE / lengths

        in_threads(multiply, list(_parts(*centers.shape)))
        return products

    def directions(self) -> tuple[Embeddings, NDArray[np.float64]]:
        """Returns the unit means [K, D] float32 and the length of each sum [K] float64.

        A mean is zero where no direction survives the rounding.
        """
        means = np.zeros(self.sums.shape, dtype=np.float32)
        lengths = np.zeros(len(self.sizes))

        def normalize(part: slice) -> None:
            sums = self.sums[part].astype(np.float64) / SCALE
            norms = np.linalg.norm(sums, axis=1)
            # The sum of opposite rows is only rounding error.
            norms[norms <= self.sizes[part] * (sums.shape[1] ** 0.5 / SCALE)] = 0.0
            unit = np.divide(
                sums, norms[:, None], out=np.zeros_like(sums), where=norms[:, None] > 0
            )
            # + 0.0 removes negative zeros, so that equal centers have equal bytes.
            means[part], lengths[part] = unit + 0.0, norms

        in_threads(normalize, list(_parts(*self.sums.shape)))
        return means, lengths


def mean_of(rows: Rows, world: World) -> NDArray[np.float32]:
    """Returns the mean of the rows of all processes, [D] float32; blocks and processes do not
    change its bits.
    """
    parts = ClusterSums.zeros(rows.num_rows // _ROWS_OF_A_MEAN + 1, rows.dimension)
    for start, block in rows.blocks(*world.own_rows(rows.num_rows)):
        parts.add(block, (start + np.arange(len(block))) // _ROWS_OF_A_MEAN)
    total = world.sum_integers(parts.sums).astype(np.float64).sum(axis=0)
    mean: NDArray[np.float32] = (total / SCALE / rows.num_rows).astype(np.float32)
    return mean


def _parts(num_centers: int, dimension: int) -> Iterator[slice]:
    together = max(1, _CONVERTED // max(1, dimension))
    for start in range(0, num_centers, together):
        yield slice(start, min(start + together, num_centers))
