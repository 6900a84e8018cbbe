"""The largest products of each row, collected while the scan goes from block to block.

Shapes: B rows of a batch, M kept.
"""

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.matmul import Hits


class Candidates:
    """The largest products seen, at most `kept` for each row; the threshold of a row only rises.

    ids: [B, M] int64, -1 for none. scores: [B, M], the products. threshold: [B]; no product that
    was left out exceeds it.

    Hits wait until there are as many as entries are kept. By then few blocks add any, and to settle
    each block would cost more than the few hits that a lower threshold lets through. Call `settle`
    after the last block.
    """

    def __init__(self, num_rows: int, kept: int) -> None:
        self.ids = np.full((num_rows, kept), -1, dtype=np.int64)
        self.scores = np.full((num_rows, kept), -np.inf, dtype=np.float32)
        self.threshold = np.full(num_rows, -np.inf, dtype=np.float32)
        self._num_held = np.zeros(num_rows, dtype=np.int64)
        self._waiting: list[Hits] = []
        self._num_waiting = 0

    def pass_over(self, threshold_B: NDArray[np.float32]) -> None:
        """Raises thresholds to values that no product of the answer is at or below."""
        self.threshold = np.maximum(self.threshold, threshold_B)

    def best(self, top: int) -> NDArray[np.int64]:
        """Returns the ids of the `top` largest products of each row, -1 where there are fewer."""
        self.settle()
        return np.take_along_axis(self.ids, self.largest(top), axis=1)

    def largest(self, top: int) -> NDArray[np.int64]:
        """Returns the positions of `top` products of each row, the largest but for ties."""
        held = self.scores[:, : self.width(top)]
        # A partition of values is faster than one of positions. Of more that are equal to the last,
        # the first count.
        rows, columns = np.nonzero(held >= np.partition(held, -top, axis=1)[:, -top, None])
        if len(rows) > len(held) * top:
            columns = columns[ranks(rows, len(held)) < top]
        return columns.reshape(len(held), top)

    def width(self, least: int) -> int:
        """Returns the number of the first positions beyond which none of any row is held, and at
        least `least`.
        """
        return max(least, int(self._num_held.max(initial=0)))

    def add(self, hits: Hits, offset: int) -> None:
        self._waiting.append(Hits(hits.rows, hits.columns + offset, hits.scores))
        self._num_waiting += len(hits.rows)
        if self._num_waiting >= self.ids.size:
            self.settle()

    def settle(self) -> None:
        if self._num_waiting == 0:
            return
        all_rows, columns, hit_scores = (
            np.concatenate([getattr(waiting, name) for waiting in self._waiting])
            for name in ("rows", "columns", "scores")
        )
        self._waiting, self._num_waiting = [], 0
        order = np.argsort(all_rows, kind="stable")
        rows, columns, hit_scores = all_rows[order], columns[order], hit_scores[order]
        slot = self._num_held[rows] + ranks(rows, len(self.ids))
        num_held = self._num_held + np.bincount(rows, minlength=len(self.ids))
        fits = num_held[rows] <= self.ids.shape[1]
        self.ids[rows[fits], slot[fits]] = columns[fits]
        self.scores[rows[fits], slot[fits]] = hit_scores[fits]
        self._num_held = np.minimum(num_held, self.ids.shape[1])
        if not fits.all():
            over = ~fits
            self._select(rows[over], slot[over], columns[over], hit_scores[over])

    def _select(
        self,
        rows: NDArray[np.int64],
        slot: NDArray[np.int64],
        columns: NDArray[np.int64],
        hit_scores: NDArray[np.float32],
    ) -> None:
        """Keeps the largest of those held and these hits, for rows that have too many."""
        kept = self.ids.shape[1]
        touched, row_of_hit = np.unique(rows, return_inverse=True)
        ids = np.full((len(touched), slot.max() + 1), -1, dtype=np.int64)
        scores = np.full(ids.shape, -np.inf, dtype=np.float32)
        ids[:, :kept], scores[:, :kept] = self.ids[touched], self.scores[touched]
        ids[row_of_hit, slot], scores[row_of_hit, slot] = columns, hit_scores
        # What a threshold has passed over meanwhile makes room.
        passed = scores <= self.threshold[touched, None]
        ids[passed], scores[passed] = -1, -np.inf
        dropped = ids.shape[1] - kept
        chosen = np.argpartition(scores, dropped, axis=1)[:, dropped:]
        self.ids[touched] = np.take_along_axis(ids, chosen, axis=1)
        self.scores[touched] = np.take_along_axis(scores, chosen, axis=1)
        # Whatever is dropped here is at most the smallest that stays.
        least = self.scores[touched].min(axis=1)
        self.threshold[touched] = np.maximum(self.threshold[touched], least)


def ranks(rows: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """Returns for each of these rows, in ascending order, how many of the same come before it."""
    num_each = np.bincount(rows, minlength=num_rows)
    firsts = np.cumsum(num_each) - num_each
    rank: NDArray[np.int64] = np.arange(len(rows)) - firsts[rows]
    return rank
