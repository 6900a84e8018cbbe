"""Finds the members nearest to each center, as examples of its cluster."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.world import World

NUM_EXAMPLES: Final = 8
NOVELTY_QUANTILE: Final = 0.95  # of members' distances; images beyond it count as novel


class NearestMembers:
    """The `num_each` highest-scoring rows of each center; rows may be added in any order.

    rows: row ids, int64 [K, num_each], padded with -1. scores: float64, padded with -inf. The order
    is score descending, then row ascending. Memory is 16 bytes per entry for any number of rows.
    """

    def __init__(self, num_centers: int, num_each: int = NUM_EXAMPLES) -> None:
        self.rows = np.full((num_centers, num_each), -1, dtype=np.int64)
        self.scores = np.full((num_centers, num_each), -np.inf)

    def add(
        self, centers: NDArray[np.integer], scores: NDArray[np.float64], rows: NDArray[np.int64]
    ) -> None:
        """Adds row ids [n] with their centers [n] and scores [n]; a row must not be added twice."""
        last_rows, last_scores = self.rows[centers, -1], self.scores[centers, -1]
        better = (scores > last_scores) | ((scores == last_scores) & (rows < last_rows))
        if not better.any():
            return
        touched = np.unique(centers[better])
        num_each = self.rows.shape[1]
        center_ids = np.concatenate([np.repeat(touched, num_each), centers[better]])
        candidate_rows = np.concatenate([self.rows[touched].ravel(), rows[better]])
        candidate_scores = np.concatenate([self.scores[touched].ravel(), scores[better]])
        order = np.lexsort((candidate_rows, -candidate_scores, center_ids))
        sorted_center_ids = center_ids[order]
        starts = np.searchsorted(sorted_center_ids, sorted_center_ids)
        rank = np.arange(len(order)) - starts
        # Each touched center contributes num_each old entries, so it keeps exactly num_each.
        chosen = order[rank < num_each]
        self.rows[touched] = candidate_rows[chosen].reshape(-1, num_each)
        self.scores[touched] = candidate_scores[chosen].reshape(-1, num_each)

    def gather(self, world: World) -> None:
        """Merges the rows of all processes; afterwards all processes have the same rows."""
        # float64 scores as int64, so that a sum of integers transfers them exactly
        local = (self.rows.copy(), self.scores.view(np.int64).copy())
        for rank in range(world.size):
            # A sum to which only one process contributes equals that contribution, bit for bit.
            rows, score_bits = (
                world.sum_integers(values if rank == world.rank else np.zeros_like(values))
                for values in local
            )
            if rank != world.rank:
                centers, columns = np.nonzero(rows >= 0)
                self.add(
                    centers, score_bits.view(np.float64)[centers, columns], rows[centers, columns]
                )
