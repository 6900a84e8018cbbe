"""The scores of pairs in a library's own order of summation, where that order does not matter.

Few centers are widened to float64 once, and no pair is copied before it is multiplied. Two orders
of summation place a score a little apart. An answer is clear where neither its order nor any of its
scores in float32 depends on that; all others are scored as `mlcd.clustering.exact_scores` does.

Shapes: B rows of a batch, K centers, D dimension, M candidates of a row.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.exact_scores import ExactScores, first_in_order, scores_of_each
from mlcd.clustering.matmul import PairScores
from mlcd.types import Embeddings

_MOST_COMPONENTS: Final = 1 << 23  # of all centers: 64 MiB


class WideCenters:
    """The centers as they are, and in float64."""

    def __init__(self, centers_KD: Embeddings, pair_scores: PairScores) -> None:
        self.centers_KD, self.pair_scores = centers_KD, pair_scores
        self.wide_KD = centers_KD.astype(np.float64)


def widened(centers_KD: Embeddings, pair_scores: PairScores | None) -> WideCenters | None:
    """Returns the centers in float64; None where there are too many, or nothing would be gained."""
    if pair_scores is None or centers_KD.size > _MOST_COMPONENTS:
        return None
    return WideCenters(centers_KD, pair_scores)


class QuickScores(ExactScores):
    """The scores of a batch of rows.

    order_B: how far apart two orders of summation may place two scores of a row.
    """

    def __init__(
        self, z_BD: Embeddings, centers: WideCenters, order_B: NDArray[np.float64]
    ) -> None:
        super().__init__(z_BD, centers.centers_KD)
        self._wide, self._order_B1 = centers, order_B[:, None]
        self._wide_BD = z_BD.astype(np.float64)

    def of_each(self, ids_BM: NDArray[np.integer]) -> NDArray[np.float64]:
        known_BM = ids_BM >= 0
        rows, _ = np.nonzero(known_BM)
        scores_BM = np.full(ids_BM.shape, -np.inf)
        scores_BM[known_BM] = self.of_pairs(rows, ids_BM[known_BM].astype(np.int64))
        return scores_BM

    def of_pairs(self, rows: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._wide.pair_scores(self._wide_BD, self._wide.wide_KD, rows, ids)

    def first(
        self, ids_BM: NDArray[np.int64], scores_BM: NDArray[np.float64], top: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        ids, scores = first_in_order(ids_BM, scores_BM, top + 1)
        (unclear,) = np.nonzero(~self._clear(scores, top))
        if len(unclear):
            ids_UM = ids_BM[unclear]
            exact_UM = scores_of_each(self.z_BD[unclear], self.centers, ids_UM)
            ids[unclear, :top], scores[unclear, :top] = first_in_order(ids_UM, exact_UM, top)
        return ids[:, :top], scores[:, :top]

    def _clear(self, scores: NDArray[np.float64], top: int) -> NDArray[np.bool_]:
        """Tells for each row, [B], whether its first scores, in descending order, are clear."""
        in_order = scores[:, :-1] > scores[:, 1:] + self._order_B1
        low, high = (scores[:, :top] + sign * self._order_B1 for sign in (-1, 1))
        with np.errstate(over="ignore"):
            alike = low.astype(np.float32) == high.astype(np.float32)
        clear: NDArray[np.bool_] = np.all(np.hstack([in_order, alike]), axis=1)
        return clear
