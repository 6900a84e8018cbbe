"""Finds the exact nearest center of each unit row, for k-means. The ids equal those of
`nearest_centers` with top=1; returning no scores makes the search faster.

A head (`mlcd.clustering.heads`) is a row's components along a few main directions. One product of
heads bounds every score from above. The full score is computed only for centers whose bound reaches
the score of a candidate, such as the row's center in the previous iteration. This is faster if a
few directions carry most of each row's length. Rows with many candidates are scored with all.

A float32 product is off by at most g |x| |c|, g = D u / (1 - D u), so the largest product is proven
if it exceeds the second largest by more than twice this error. A `CenterScan` decides other rows.

Shapes: B rows of a batch, C centers of a block, K centers, D dimension, H head components.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.heads import Heads, main_directions
from mlcd.clustering.matmul import inner_products, single_scores
from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.row_threads import allowed_threads, batches, in_threads, limited_blas
from mlcd.types import Embeddings

_BATCH_ROWS: Final = 1024  # rows per matrix product; with more, products leave the cache
_LEAST_ROWS: Final = 512  # fewest rows per thread's matrix product
_WORTH_THREADS: Final = 1 << 28  # multiplications: 5 ms on one core; two threads start in 0.5 ms
_BLOCK_CENTERS: Final = 1024
_ROUNDOFF: Final = 2.0**-24
_COMPARISON_ERROR: Final = 2.0**-22  # error of comparing float32 numbers near 1 after a subtraction
# bound on the length of rows and centers: unit length, up to rounding
_MAX_LENGTH: Final = 1.01
_SAMPLED_CENTERS: Final = 8192
_COMPONENTS_PER_HEAD_COMPONENT: Final = 8  # a head has 1/8 of the components
_LEAST_HEAD: Final = 16
_MAX_HEAD_COST: Final = 0.25  # heads are used up to this share of the full product's cost
# Scoring one center separately costs as much as 32 in a matrix product: a row with more than
# _MAX_CANDIDATES candidates, or more than K / 32, is scored against all centers.
_MAX_CANDIDATES: Final = 64
_SINGLE_SCORE_COST: Final = 32
_MAX_WORK: Final = 0.5  # work after heads, of that without, above which later batches skip heads


def heads_of(centers_KD: Embeddings) -> Heads | None:
    """Returns the projection to heads along the main directions of the centers; None if heads would
    cost more than `_MAX_HEAD_COST` of the full product.
    """
    num_centers, dimension = centers_KD.shape
    num = max(_LEAST_HEAD, dimension // _COMPONENTS_PER_HEAD_COMPONENT)
    if num * (num_centers + dimension) > _MAX_HEAD_COST * num_centers * dimension:
        return None
    sample = centers_KD[:: max(1, num_centers // _SAMPLED_CENTERS)]
    return Heads(main_directions(sample, num))


class NearestCenter:
    """An index of unit centers [K, D] for exact look-ups of the nearest center.

    heads: projection used to rule out centers; None disables pruning. search_all: finds the nearest
    of all centers; None to multiply in float32.
    """

    def __init__(
        self,
        centers_KD: Embeddings,
        heads: Heads | None = None,
        search_all: Callable[[Embeddings], NDArray[np.int32]] | None = None,
    ) -> None:
        self._centers_KD = centers_KD
        self._slack = _growth(centers_KD.shape[1]) * _MAX_LENGTH**2
        self._heads, self._search_all = heads, search_all
        self._had_previous = False
        if heads is not None:
            self._center_heads = heads.of(centers_KD)
            num = self._center_heads.shape[1]
            self._head_slack = (heads.slack + _growth(num)) * _MAX_LENGTH**2 + _COMPARISON_ERROR
        self._max_candidates = min(_MAX_CANDIDATES, len(centers_KD) // _SINGLE_SCORE_COST)

    @property
    def skips_heads(self) -> bool:
        """Returns whether heads ruled out too few centers, even with previous ids."""
        return self._had_previous and self._heads is None

    def nearest(
        self, embeddings: Embeddings, previous: NDArray[np.int32] | None = None
    ) -> NDArray[np.int32]:
        """Returns the center with the highest float64 score for each unit row, [N] int32; ties go
        to the lowest id.

        previous: [N] center ids; near centers make the search faster and never change its result.
        """
        self._had_previous = previous is not None
        ids = np.empty(len(embeddings), dtype=np.int32)
        is_open = np.ones(len(embeddings), dtype=np.bool_)

        def search(batch: slice) -> None:
            candidates = None if previous is None else previous[batch]
            ids[batch], is_open[batch] = self._search(embeddings[batch], candidates)

        if self._heads is not None or self._search_all is None:
            self._in_batches(search, len(embeddings))
        if is_open.any():
            search_all = self._search_all or self._search_exactly
            ids[is_open] = search_all(embeddings if is_open.all() else embeddings[is_open])
        return ids

    def _search(
        self, z_BD: Embeddings, previous: NDArray[np.int32] | None
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns the nearest center of each row, and a mask of the rows still undecided."""
        ids_B, is_open_B = np.zeros(len(z_BD), np.int32), np.ones(len(z_BD), np.bool_)
        if (heads := self._heads) is not None:
            ids_B, is_open_B, work = self._prune(heads, z_BD, previous)
            if work > _MAX_WORK:
                self._heads = None
        if self._search_all is None and is_open_B.any():  # while the rows are in the cache
            open_rows = z_BD if is_open_B.all() else z_BD[is_open_B]
            ids_B[is_open_B], is_open_B[is_open_B] = self._multiply(open_rows)
        return ids_B, is_open_B

    def _in_batches(self, work: Callable[[slice], object], num_rows: int) -> None:
        if num_rows * self._centers_KD.size >= _WORTH_THREADS:
            parts = batches(num_rows, most=_BATCH_ROWS, least=_LEAST_ROWS)
            if len(parts) >= allowed_threads():  # with fewer batches, BLAS uses the idle cores
                in_threads(work, parts)
                return
        for start in range(0, num_rows, _BATCH_ROWS):
            work(slice(start, min(start + _BATCH_ROWS, num_rows)))

    def _search_exactly(self, rows: Embeddings) -> NDArray[np.int32]:
        is_short = len(rows) * self._centers_KD.size < _WORTH_THREADS
        # after a product, threads of OpenBLAS spin, beside the products of the next batch
        with limited_blas() if is_short else nullcontext():
            return self._exact_scan.nearest(rows, 1).ids[:, 0].astype(np.int32)

    @cached_property
    def _exact_scan(self) -> CenterScan:
        return CenterScan(self._centers_KD, matmul="numpy")

    def _multiply(self, z_BD: Embeddings) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns the center of each row's largest product, and a mask of the unproven rows."""
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
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_], float]:
        """Returns the nearest center of each row, a mask of the rows still undecided, and the work
        of the single scores and the undecided rows as a share of a product with all centers.
        """
        rows_BH = heads.of(z_BD)
        ids_B = self._guess_centers(rows_BH) if previous is None else previous.copy()
        candidate_scores_B = inner_products(z_BD, self._centers_KD[ids_B])
        least_B = candidate_scores_B - np.float32(self._slack + self._head_slack)
        pairs, num_candidates_B = [], np.zeros(len(z_BD), dtype=np.int64)
        for start, bound_BC in self._bounds(rows_BH):
            reaching_BC = bound_BC >= least_B[:, None]
            num_candidates_B += np.count_nonzero(reaching_BC, axis=1)
            if num_candidates_B.min() > self._max_candidates:
                return ids_B, np.ones(len(z_BD), dtype=np.bool_), 1.0
            reaching_BC[num_candidates_B > self._max_candidates] = (
                False  # limits the pairs in memory
            )
            flat = np.flatnonzero(reaching_BC)
            pairs.append((flat // bound_BC.shape[1], flat % bound_BC.shape[1] + start))
        is_open_B = num_candidates_B > self._max_candidates
        rows, columns = (np.concatenate(part) for part in zip(*pairs, strict=True))
        needs_score = ((num_candidates_B > 1) & ~is_open_B)[rows]
        rows, columns = rows[needs_score], columns[needs_score]
        work = len(rows) * _SINGLE_SCORE_COST / (len(z_BD) * len(self._centers_KD))
        work += float(is_open_B.mean())
        scores = single_scores(z_BD, self._centers_KD, rows, columns)
        best_B = np.full(len(z_BD), -np.inf, dtype=np.float32)
        np.maximum.at(best_B, rows, scores)
        may_be_nearest = scores >= best_B[rows] - np.float32(4 * self._slack)
        rows, columns = rows[may_be_nearest], columns[may_be_nearest]
        is_open_B |= np.bincount(rows, minlength=len(z_BD)) > 1
        ids_B[rows] = columns
        return ids_B, is_open_B, work

    def _guess_centers(self, rows_BH: Embeddings) -> NDArray[np.int32]:
        """Returns the center with the highest bound for each row."""
        ids_B = np.zeros(len(rows_BH), dtype=np.int32)
        best_B = np.full(len(rows_BH), -np.inf, dtype=np.float32)
        for start, bound_BC in self._bounds(rows_BH):
            columns = bound_BC.argmax(axis=1)
            highest = bound_BC[np.arange(len(columns)), columns]
            ids_B = np.where(highest > best_B, columns + start, ids_B).astype(np.int32)
            best_B = np.maximum(best_B, highest)
        return ids_B

    def _bounds(self, rows_BH: Embeddings) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yields the first center id of each block and upper bounds [B, C] of its scores, without
        `_head_slack` added.
        """
        for start in range(0, len(self._center_heads), _BLOCK_CENTERS):
            yield start, rows_BH @ self._center_heads[start : start + _BLOCK_CENTERS].T


def _growth(num_terms: int) -> float:
    return num_terms * _ROUNDOFF / (1 - num_terms * _ROUNDOFF)
