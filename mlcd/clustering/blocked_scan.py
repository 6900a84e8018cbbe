"""The exact scan of centers that are not in memory together: one block of them after the other.

Each block gives its nearest centers with their float64 scores. The best of all blocks, by score
descending and id ascending, are those of one scan of all centers, bit for bit.

Shapes: K centers, D dimension.
"""

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.query_checks import check_query
from mlcd.clustering.rows import Rows
from mlcd.types import Embeddings, Neighbors, ScanCounts


class BlockedScan:
    """The centers [K, D], of which `at_once` are in memory at a time."""

    def __init__(self, centers: Rows, at_once: int) -> None:
        self._centers, self._at_once = centers, at_once

    def nearest(
        self, embeddings: Embeddings, top: int = 8, threshold: float | None = None
    ) -> Neighbors:
        """Returns what `CenterScan.nearest` returns for all centers. Of the levels that settled a
        row in its blocks, the last one counts.
        """
        check_query(embeddings, top, self._centers.dimension)
        ids = np.full((len(embeddings), top), -1, np.int64)
        scores = np.full((len(embeddings), top), -np.inf)
        levels, products = np.zeros(len(embeddings), np.int64), ""
        for start in range(0, self._centers.num_rows, self._at_once):
            stop = min(start + self._at_once, self._centers.num_rows)
            scan = CenterScan(self._centers.read(np.arange(start, stop)))
            found, their_scores, level = scan.search(embeddings, min(top, stop - start))
            ids, scores = _first(
                np.hstack([ids, start + found]), np.hstack([scores, their_scores]), top
            )
            levels, products = np.maximum(levels, level), scan.products
        if threshold is not None:  # compares the scores before they are rounded
            ids[scores < threshold], scores[scores < threshold] = -1, -np.inf
        counts = np.bincount(levels, minlength=4) if self._centers.num_rows else [0] * 4
        return Neighbors(
            ids.astype(np.int32),
            scores.astype(np.float32),
            ScanCounts(products, *(int(count) for count in counts)),
        )


def _first(
    ids: NDArray[np.int64], scores: NDArray[np.float64], top: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the first `top` of each row by score descending, then id ascending."""
    order = np.lexsort((ids, -scores), axis=1)[:, :top]
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
