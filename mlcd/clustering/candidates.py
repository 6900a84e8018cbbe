"""The largest products of each row, collected while the scan goes from block to block.

Shapes: B rows of a batch, M kept.
"""

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.matmul import Hits, largest_columns, ranks


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
        held = max(top, int(self._num_held.max(initial=0)))
        return np.take_along_axis(self.ids, largest_columns(self.scores[:, :held], top), axis=1)

    def reaching(self, least_B: NDArray[np.float32] | None, top: int) -> NDArray[np.int64]:
        """Returns what `best` does. least_B: values that at least `top` products of the first block
        reach; where it is the only one so far, such products are among the largest.
        """
        if least_B is not None and (hits := self._of_one_block()):
            able = hits.scores >= least_B[hits.rows]
            found = first_of_each(hits.rows[able], hits.columns[able], len(self.ids), top)
            if found is not None:
                return found
        return self.best(top)

    def _of_one_block(self) -> Hits | None:
        """Returns the hits of the only block where none was settled and all find room."""
        if len(self._waiting) != 1 or self._num_held.any():
            return None
        hits = self._waiting[0]
        fits = np.bincount(hits.rows).max(initial=0) <= self.ids.shape[1]
        return hits if fits else None

    def above(
        self, threshold_B: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Returns the rows, in ascending order, the ids and the products of those above these
        thresholds.
        """
        if hits := self._of_one_block():
            able = hits.scores > threshold_B[hits.rows]
            return hits.rows[able], hits.columns[able], hits.scores[able]
        self.settle()
        held = int(self._num_held.max(initial=0))
        rows, columns = np.nonzero(self.scores[:, :held] > threshold_B[:, None])
        return rows, self.ids[rows, columns], self.scores[rows, columns]

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
        above = hit_scores > self.threshold[all_rows]  # it may have risen since
        all_rows, columns, hit_scores = all_rows[above], columns[above], hit_scores[above]
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
        chosen = largest_columns(scores, kept)
        self.ids[touched] = np.take_along_axis(ids, chosen, axis=1)
        self.scores[touched] = np.take_along_axis(scores, chosen, axis=1)
        # Whatever is dropped here is at most the smallest that stays.
        least = self.scores[touched].min(axis=1)
        self.threshold[touched] = np.maximum(self.threshold[touched], least)


def first_of_each(
    rows: NDArray[np.int64], columns: NDArray[np.int64], num_rows: int, top: int
) -> NDArray[np.int64] | None:
    """Returns the first `top` columns of each row, [num_rows, top]; None where one has fewer, as
    where products overflow. rows: in ascending order.
    """
    chosen = columns[ranks(rows, num_rows) < top]
    return chosen.reshape(num_rows, top) if len(chosen) == num_rows * top else None
