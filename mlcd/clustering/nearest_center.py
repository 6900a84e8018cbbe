"""The exact nearest center of each unit row, for k-means: what `nearest_centers` gives with top=1,
for less, because no scores are wanted.

One product of heads (`mlcd.clustering.heads`) bounds every score from above. Only centers whose
bound reaches the score of a known one, such as the row's last, are multiplied out. That pays where
a few directions hold most of a row. Rows of which many centers remain are multiplied by all.

A float32 product is off by at most g |x| |c|, g = D u / (1 - D u), so the largest is proven where
the second lies more than twice that below. What float32 does not prove, a `CenterScan` decides.

Shapes: B rows of a batch, C centers of a block, K centers, D dimension, H head components.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.heads import Heads, main_directions
from mlcd.clustering.matmul import inner_products, single_scores
from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.row_threads import allowed_threads, batches, in_threads
from mlcd.types import Embeddings

_BATCH_ROWS: Final = 4096  # of one product; few large ones are faster
_LEAST_ROWS: Final = 512  # of a thread's product
_WORTH_THREADS: Final = 1 << 28  # multiplications: 5 ms of a core; two threads begin in half of one
_BLOCK_CENTERS: Final = 1024
_ROUNDOFF: Final = 2.0**-24
_COMPARED: Final = 2.0**-22  # error of comparing float32 numbers near 1 after a subtraction
# bound on the length of rows and centers, which are of unit length but for rounding
_LONGEST: Final = 1.01
_SAMPLED_CENTERS: Final = 8192
_ONE_IN: Final = 8  # components that are in a head
_LEAST_HEAD: Final = 16
_MOST_WORK: Final = 0.25
# A center that is multiplied by itself costs as much as 32 in one product: a row with more than
# these, or with more than cost as much as all centers in one product, is multiplied by all.
_MOST_KNOWN: Final = 64
_CENTERS_EACH: Final = 32
_MOST_OPEN: Final = 0.5  # of a batch's rows, above which the next batches do without heads


def heads_of(centers_KD: Embeddings) -> Heads | None:
    """Returns what makes heads along the directions that hold most of these centers; None where to
    make and multiply them takes more than a share of the product of all components.
    """
    num_centers, dimension = centers_KD.shape
    num = max(_LEAST_HEAD, dimension // _ONE_IN)
    if num * (num_centers + dimension) > _MOST_WORK * num_centers * dimension:
        return None
    sample = centers_KD[:: max(1, num_centers // _SAMPLED_CENTERS)]
    return Heads(main_directions(sample, num))


class NearestCenter:
    """A set of unit centers [K, D] made ready for exact look-ups of the nearest.

    heads: those by which centers are ruled out; None for none. search_all: finds the nearest of all
    centers; None to multiply in float32.
    """

    def __init__(
        self,
        centers_KD: Embeddings,
        heads: Heads | None = None,
        search_all: Callable[[Embeddings], NDArray[np.int32]] | None = None,
    ) -> None:
        self._centers_KD = centers_KD
        self._slack = _growth(centers_KD.shape[1]) * _LONGEST**2
        self._heads, self._search_all = heads, search_all
        if heads is not None:
            self._center_heads = heads.of(centers_KD)
            num = self._center_heads.shape[1]
            self._head_slack = (heads.slack + _growth(num)) * _LONGEST**2 + _COMPARED
        self._most_known = min(_MOST_KNOWN, len(centers_KD) // _CENTERS_EACH)

    def nearest(
        self, embeddings: Embeddings, previous: NDArray[np.int32] | None = None
    ) -> NDArray[np.int32]:
        """Returns [N] int32: the center of highest float64 score of each unit row, of equals the
        lowest id.

        previous: [N] ids of centers, the nearer the better; the answer does not depend on them.
        """
        ids = np.empty(len(embeddings), dtype=np.int32)
        is_open = np.ones(len(embeddings), dtype=np.bool_)

        def search(batch: slice) -> None:
            known = None if previous is None else previous[batch]
            ids[batch], is_open[batch] = self._search(embeddings[batch], known)

        if self._heads is not None or self._search_all is None:
            self._in_batches(search, len(embeddings))
        if is_open.any():
            search_all = self._search_all or self._search_exactly
            ids[is_open] = search_all(embeddings if is_open.all() else embeddings[is_open])
        return ids

    def _search(
        self, z_BD: Embeddings, previous: NDArray[np.int32] | None
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns the nearest center of each row, and of which rows it is still open."""
        ids_B, is_open_B = np.zeros(len(z_BD), np.int32), np.ones(len(z_BD), np.bool_)
        if (heads := self._heads) is not None:
            ids_B, is_open_B = self._prune(heads, z_BD, previous)
            if is_open_B.mean() > _MOST_OPEN:
                self._heads = None
        if self._search_all is None and is_open_B.any():  # now, while the rows are in the cache
            ids_B[is_open_B], is_open_B[is_open_B] = self._multiply(z_BD[is_open_B])
        return ids_B, is_open_B

    def _in_batches(self, work: Callable[[slice], object], num_rows: int) -> None:
        if num_rows * self._centers_KD.size >= _WORTH_THREADS:
            parts = batches(num_rows, most=_BATCH_ROWS, least=_LEAST_ROWS)
            if len(parts) >= allowed_threads():  # fewer leave cores to BLAS
                in_threads(work, parts)
                return
        for start in range(0, num_rows, _BATCH_ROWS):
            work(slice(start, min(start + _BATCH_ROWS, num_rows)))

    def _search_exactly(self, rows: Embeddings) -> NDArray[np.int32]:
        return self._exact_scan.nearest(rows, 1).ids[:, 0].astype(np.int32)

    @cached_property
    def _exact_scan(self) -> CenterScan:
        return CenterScan(self._centers_KD, matmul="numpy")

    def _multiply(self, z_BD: Embeddings) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns the center of the largest product of each row, and where it is not proven."""
        rows = np.arange(len(z_BD))
        best_B = np.full(len(z_BD), -np.inf, dtype=np.float32)
        second_B = best_B.copy()
        ids_B = np.zeros(len(z_BD), dtype=np.int32)
        for start in range(0, len(self._centers_KD), _BLOCK_CENTERS):
            product_BC = z_BD @ self._centers_KD[start : start + _BLOCK_CENTERS].T
            columns = product_BC.argmax(axis=1)
            largest = product_BC[rows, columns]
            product_BC[rows, columns] = -np.inf
            second_B = np.maximum(
                np.maximum(second_B, product_BC.max(axis=1)), np.minimum(best_B, largest)
            )
            ids_B = np.where(largest > best_B, columns + start, ids_B).astype(np.int32)
            best_B = np.maximum(best_B, largest)
        return ids_B, best_B - second_B <= 2 * self._slack

    def _prune(
        self, heads: Heads, z_BD: Embeddings, previous: NDArray[np.int32] | None
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns the nearest center of each row, and of which rows it is still open."""
        rows_BH = heads.of(z_BD)
        ids_B = self._highest_bound(rows_BH) if previous is None else previous.copy()
        known_B = inner_products(z_BD, self._centers_KD[ids_B])
        least_B = known_B - np.float32(self._slack + self._head_slack)
        pairs, num_B = [], np.zeros(len(z_BD), dtype=np.int64)
        for start, bound_BC in self._bounds(rows_BH):
            reaching_BC = bound_BC >= least_B[:, None]
            num_B += np.count_nonzero(reaching_BC, axis=1)
            if num_B.min() > self._most_known:
                return ids_B, np.ones(len(z_BD), dtype=np.bool_)
            reaching_BC[num_B > self._most_known] = False  # so that few pairs are in memory
            flat = np.flatnonzero(reaching_BC)
            pairs.append((flat // bound_BC.shape[1], flat % bound_BC.shape[1] + start))
        is_open_B = num_B > self._most_known
        rows, columns = (np.concatenate(part) for part in zip(*pairs, strict=True))
        is_able = ((num_B > 1) & ~is_open_B)[rows]
        rows, columns = rows[is_able], columns[is_able]
        scores = single_scores(z_BD, self._centers_KD, rows, columns)
        best_B = np.full(len(z_BD), -np.inf, dtype=np.float32)
        np.maximum.at(best_B, rows, scores)
        is_able = scores >= best_B[rows] - np.float32(4 * self._slack)
        rows, columns = rows[is_able], columns[is_able]
        is_open_B |= np.bincount(rows, minlength=len(z_BD)) > 1
        ids_B[rows] = columns
        return ids_B, is_open_B

    def _highest_bound(self, rows_BH: Embeddings) -> NDArray[np.int32]:
        """Returns a center of each row that is probably near, for rows of which none is known."""
        ids_B = np.zeros(len(rows_BH), dtype=np.int32)
        best_B = np.full(len(rows_BH), -np.inf, dtype=np.float32)
        for start, bound_BC in self._bounds(rows_BH):
            columns = bound_BC.argmax(axis=1)
            highest = bound_BC[np.arange(len(columns)), columns]
            ids_B = np.where(highest > best_B, columns + start, ids_B).astype(np.int32)
            best_B = np.maximum(best_B, highest)
        return ids_B

    def _bounds(self, rows_BH: Embeddings) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yields the first of each block of centers, and upper bounds [B, C] of the scores with the
        block but for `_head_slack`.
        """
        for start in range(0, len(self._center_heads), _BLOCK_CENTERS):
            yield start, rows_BH @ self._center_heads[start : start + _BLOCK_CENTERS].T


def _growth(num_terms: int) -> float:
    return num_terms * _ROUNDOFF / (1 - num_terms * _ROUNDOFF)
