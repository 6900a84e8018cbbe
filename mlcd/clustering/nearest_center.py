"""The exact nearest center of each row, for k-means: `nearest_centers` with top=1, made for many
short passes.

Two ways lead to the same answer. The centers that heads leave of the first rows choose one.

The dense way computes float32 products with all centers. With g = D u / (1 - D u) a product is off
by at most g |x| |c|, so the largest is proven where the second lies more than twice that below.

The pruned way bounds scores. One product of heads (`mlcd.clustering.heads`) bounds every score from
above. Only centers whose bound reaches the score of a known one, such as the row's last, are
multiplied out. That pays where a few directions hold most of a row.

Rows that neither way proves are decided by float64 scores, then ids.

Shapes: B rows of a batch, C centers of a block, K centers, D dimension, H head components.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.exact_scores import exact_scores
from mlcd.clustering.heads import Basis, Heads
from mlcd.clustering.matmul import single_scores
from mlcd.clustering.row_threads import allowed_threads, batches, in_threads
from mlcd.types import Embeddings

_BATCH_ROWS: Final = 4096  # of one product; few large ones are faster
_LEAST_ROWS: Final = 512  # of a thread's product
_WORTH_THREADS: Final = 1 << 28  # multiplications: 5 ms of a core; two threads begin in half of one
_BLOCK_CENTERS: Final = 1024
_COUNTED_ROWS: Final = 1024
_ROUNDOFF: Final = 2.0**-24
_COMPARED: Final = 2.0**-22  # error of comparing float32 numbers near 1 after a subtraction
# bound on the length of rows and centers, which are of unit length but for rounding
_LONGEST: Final = 1.01
_HEADS: Final = (8, 4)  # the shares tried: one in so many components
# A center that is multiplied out by itself costs as much as so many in one product. Heads are used
# where this and their own products come to less than this share of the dense way's: what surrounds
# the products is about as much again.
_EACH_PAIR: Final = 32
_WORTH_HEADS: Final = 0.5
_LEAST_HEAD: Final = 16
_MOST_KNOWN: Final = 64  # centers multiplied out for one row; a row with more joins the dense way


@dataclass(frozen=True)
class _Head:
    heads: Heads
    centers: Embeddings  # [K, H + 1]: heads, and the length of the tail as one more component
    score_slack: float

    @classmethod
    def of(cls, basis: Basis, centers_KD: Embeddings, one_in: int) -> "_Head":
        num = max(_LEAST_HEAD, centers_KD.shape[1] // one_in)
        heads = Heads(basis.vectors_DD[:, :num])
        score_slack = (heads.slack + _growth(num + 1)) * _LONGEST**2 + _COMPARED
        return cls(heads, heads.of(centers_KD), score_slack)

    def bounds(self, rows_BH: Embeddings, start: int) -> NDArray[np.float32]:
        """Returns upper bounds [B, C] of the scores with the block of centers from `start` on, but
        for `score_slack`.
        """
        bound_BC: NDArray[np.float32] = rows_BH @ self.centers[start : start + _BLOCK_CENTERS].T
        return bound_BC


class NearestCenter:
    """A set of unit centers [K, D] made ready for exact look-ups of the nearest.

    basis: the directions by which to prune; None for the dense way. one_in: the share of components
    in the head; 0 for the dense way; None to choose it on the first rows, after which it names the
    chosen one.
    """

    def __init__(
        self, centers_KD: Embeddings, basis: Basis | None = None, one_in: int | None = None
    ) -> None:
        self._centers_KD = centers_KD
        self._slack = _growth(centers_KD.shape[1]) * _LONGEST**2
        self._basis = basis
        self.one_in = 0 if basis is None else one_in
        self._head = _Head.of(basis, centers_KD, one_in) if basis is not None and one_in else None

    def nearest(
        self, embeddings: Embeddings, previous: NDArray[np.int32] | None = None
    ) -> NDArray[np.int32]:
        """Returns [N] int32: the center of highest float64 score of each unit row, of equals the
        lowest id.

        previous: [N] ids of centers, the nearer the better; the answer does not depend on them.
        """
        self.prunes(embeddings, previous)
        nearest = np.empty(len(embeddings), dtype=np.int32)

        def search(batch: slice) -> None:
            nearest[batch] = self._batch(
                embeddings[batch], None if previous is None else previous[batch], self._head
            )

        if len(embeddings) * self._centers_KD.size >= _WORTH_THREADS:
            parts = batches(len(embeddings), most=_BATCH_ROWS, least=_LEAST_ROWS)
            if len(parts) >= allowed_threads():  # fewer leave cores to BLAS
                in_threads(search, parts)
                return nearest
        for start in range(0, len(embeddings), _BATCH_ROWS):
            search(slice(start, start + _BATCH_ROWS))
        return nearest

    def prunes(self, rows: Embeddings, previous: NDArray[np.int32] | None) -> bool:
        """Tells whether heads are used; chooses them on these rows if that is still to be done."""
        if self.one_in is None and self._basis is not None and len(rows) >= _COUNTED_ROWS:
            some = slice(_COUNTED_ROWS)
            self._choose(self._basis, rows[some], None if previous is None else previous[some])
        return self._head is not None

    def _choose(self, basis: Basis, z_BD: Embeddings, previous: NDArray[np.int32] | None) -> None:
        """Keeps the heads that leave least to multiply; none where all leave much."""
        num_centers, dimension = self._centers_KD.shape
        self.one_in, least = 0, _WORTH_HEADS
        for one_in in _HEADS:
            head = _Head.of(basis, self._centers_KD, one_in)
            num_B = self._reaching(head.heads.of(z_BD), z_BD, previous, head)[1]
            pairs_B = np.where(num_B > _MOST_KNOWN, num_centers, _EACH_PAIR * num_B)
            length = head.centers.shape[1]
            work = length / num_centers + length / dimension + pairs_B.mean() / num_centers
            if work < least:
                self.one_in, self._head, least = one_in, head, work

    def _batch(
        self, z_BD: Embeddings, previous: NDArray[np.int32] | None, head: _Head | None
    ) -> NDArray[np.int32]:
        return self._dense(z_BD) if head is None else self._pruned(z_BD, previous, head)

    def _dense(self, z_BD: Embeddings) -> NDArray[np.int32]:
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
        unproven = np.flatnonzero(best_B - second_B <= 2 * self._slack)
        if len(unproven):
            ids_B[unproven] = self._decided(z_BD[unproven], best_B[unproven])
        return ids_B

    def _decided(self, z_BD: Embeddings, best_B: NDArray[np.float32]) -> NDArray[np.int32]:
        """Decides by float64 scores among the centers that may be nearest despite rounding."""
        found = []
        for start in range(0, len(self._centers_KD), _BLOCK_CENTERS):
            product_BC = z_BD @ self._centers_KD[start : start + _BLOCK_CENTERS].T
            rows, columns = np.nonzero(product_BC >= best_B[:, None] - np.float32(4 * self._slack))
            found.append((rows, columns + start))
        pairs = (
            np.concatenate([rows for rows, _ in found]),
            np.concatenate([columns for _, columns in found]),
        )
        return self._first(z_BD, *pairs)

    def _first(
        self, z_BD: Embeddings, rows: NDArray[np.int64], columns: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        scores = exact_scores(z_BD, self._centers_KD, rows, columns)
        order = np.lexsort((columns, -scores, rows))
        _, first = np.unique(rows[order], return_index=True)
        return columns[order][first].astype(np.int32)

    def _pruned(
        self, z_BD: Embeddings, previous: NDArray[np.int32] | None, head: _Head
    ) -> NDArray[np.int32]:
        ids_B, num_B, found = self._reaching(head.heads.of(z_BD), z_BD, previous, head)
        if len(many := np.flatnonzero(num_B > _MOST_KNOWN)):
            ids_B[many] = self._dense(z_BD[many])
        if len(many) < len(z_BD):
            rows, columns = (np.concatenate(part) for part in zip(*found, strict=True))
            open_pairs = (num_B[rows] > 1) & (num_B[rows] <= _MOST_KNOWN)
            self._multiply_out(z_BD, rows[open_pairs], columns[open_pairs], ids_B)
        return ids_B

    def _reaching(
        self,
        rows_BH: Embeddings,
        z_BD: Embeddings,
        previous: NDArray[np.int32] | None,
        head: _Head,
    ) -> tuple[
        NDArray[np.int32], NDArray[np.int64], list[tuple[NDArray[np.int64], NDArray[np.int64]]]
    ]:
        """Returns a known center of each row, the number of centers whose bound reaches its score,
        [B] each, and the pairs of rows and such centers, block by block.

        Of a row with too many only some are counted, and not all of its pairs are there.
        """
        known_ids_B = self._highest_bound(rows_BH, head) if previous is None else previous.copy()
        known_B = np.einsum("bd,bd->b", z_BD, self._centers_KD[known_ids_B])
        least_B = (known_B - np.float32(self._slack + head.score_slack))[:, None]
        found, num_B = [], np.zeros(len(z_BD), dtype=np.int64)
        for start in range(0, len(self._centers_KD), _BLOCK_CENTERS):
            reaching_BC = head.bounds(rows_BH, start) >= least_B
            num_B += np.count_nonzero(reaching_BC, axis=1)
            if num_B.min() > _MOST_KNOWN:  # nothing is pruned
                break
            reaching_BC[num_B > _MOST_KNOWN] = False  # so that few pairs of a row are in memory
            flat = np.flatnonzero(reaching_BC)
            found.append((flat // reaching_BC.shape[1], flat % reaching_BC.shape[1] + start))
        return known_ids_B, num_B, found

    def _highest_bound(self, rows_BH: Embeddings, head: _Head) -> NDArray[np.int32]:
        """Returns a center of each row that is probably near, for rows of which none is known."""
        ids_B = np.zeros(len(rows_BH), dtype=np.int32)
        best_B = np.full(len(rows_BH), -np.inf, dtype=np.float32)
        for start in range(0, len(self._centers_KD), _BLOCK_CENTERS):
            bound_BC = head.bounds(rows_BH, start)
            columns = bound_BC.argmax(axis=1)
            highest = bound_BC[np.arange(len(columns)), columns]
            ids_B = np.where(highest > best_B, columns + start, ids_B).astype(np.int32)
            best_B = np.maximum(best_B, highest)
        return ids_B

    def _multiply_out(
        self,
        z_BD: Embeddings,
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
        ids_B: NDArray[np.int32],
    ) -> None:
        if len(rows) == 0:
            return
        scores = single_scores(z_BD, self._centers_KD, rows, columns)
        best_B = np.full(len(z_BD), -np.inf, dtype=np.float32)
        np.maximum.at(best_B, rows, scores)
        running = scores >= best_B[rows] - np.float32(4 * self._slack)
        rows, columns = rows[running], columns[running]
        alone = np.bincount(rows, minlength=len(z_BD))[rows] == 1
        ids_B[rows[alone]] = columns[alone]
        if not alone.all():
            ids_B[np.unique(rows[~alone])] = self._first(z_BD, rows[~alone], columns[~alone])


def _growth(num_terms: int) -> float:
    return num_terms * _ROUNDOFF / (1 - num_terms * _ROUNDOFF)
