"""Clusters of bounded size: a full center keeps its nearest rows, and each other row goes to the
nearest center that accepts it.

Take all pairs of a row and a center by score descending, and let each row join the first center
with room. This is the unique stable assignment (Gale and Shapley, 1962): no row is nearer to
another center that has room or contains a row less near to it. It is found without listing the
pairs: every row applies to its nearest center; a center with too many rows keeps its nearest
`bound` and from then on accepts only nearer rows; rejected rows apply to their next centers. The
result does not depend on the order of the applications.

Assignments and means alternate, as in k-means, and the best turn is returned. Memory is 16 bytes
per row, plus the centers and their sums.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.kmeans import KMeansResult
from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.repair import next_centers
from mlcd.clustering.rows import BLOCK_ROWS, Rows
from mlcd.clustering.sums import ClusterSums
from mlcd.errors import InvalidInput
from mlcd.types import Embeddings

TURNS: Final = 20  # of assignment and means, at most
# per row: center and score, and its centers in k-means and in the best turn
BOUNDED_ROW_BYTES: Final = 16
_SLACK: Final = 1.25  # default bound, in mean sizes
_TOLERANCE: Final = 1e-4  # relative gain of the objective below which the turns end
_PAIRS: Final = 1 << 20  # of a row and a center, searched at once: 40 MiB
_CENTERS_PER_SEARCH: Final = 16  # nearest centers searched at once for a rejected row


def checked_bound(num_rows: int, num_clusters: int, largest: int | None) -> int:
    """Returns the maximum size of a cluster: `largest`, or by default a quarter above the mean.

    Raises InvalidInput if clusters of this size cannot contain all rows.
    """
    if largest is None:
        return int(np.ceil(_SLACK * num_rows / num_clusters))
    if largest * num_clusters < num_rows:
        raise InvalidInput(
            f"{num_clusters} clusters of at most {largest} rows cannot contain {num_rows}",
            remedy=f"allow {-(-num_rows // num_clusters)} rows or more, or ask for more clusters",
        )
    return largest


def bound_sizes(
    rows: Rows,
    start: KMeansResult,
    bound: int,
    *,
    seed: int = 0,
    on_turn: Callable[[float], None] = lambda _: None,
) -> KMeansResult:
    """Returns clusters of at most `bound` unit rows each. start: the clusters of k-means.

    The assignment is stable for the returned centers. on_turn: called with the objective of each
    turn.
    """
    centers, best, objective = start.centers, start, -np.inf
    num_splits = start.num_splits
    for turn in range(TURNS):
        assignment = bounded_assignment(rows, centers, bound)
        totals = _totals(rows, assignment, len(centers))
        reached = totals.objective(centers)
        on_turn(reached)
        gained = reached - objective
        if gained > 0:
            objective = reached
            best = KMeansResult(
                centers,
                totals.sizes,
                totals.cosines(centers),
                assignment,
                (*start.objective, reached),
                num_splits,
            )
        if gained < _TOLERANCE * abs(reached):
            break
        centers, repaired = next_centers(totals, centers, seed, turn)
        num_splits += repaired
    return best


def bounded_assignment(rows: Rows, centers: Embeddings, bound: int) -> NDArray[np.int32]:
    """Returns the center of each unit row, [N] int32; no center has more than `bound` rows.

    The bound times the number of centers must reach the number of rows.
    """
    matching = _StableAssignment(centers, bound, rows.num_rows)
    for first, block in rows.blocks(0, rows.num_rows):
        matching.apply(block, np.arange(first, first + len(block)), 1)
    while len(rejected := matching.reject_excess()):
        for start in range(0, len(rejected), BLOCK_ROWS):
            row_ids = rejected[start : start + BLOCK_ROWS]
            matching.apply(rows.read(row_ids), row_ids, min(_CENTERS_PER_SEARCH, len(centers)))
    return matching.own


class _StableAssignment:
    """The present center of each row, and the last row that each full center accepts.

    own: center of each row, [N] int32; -1 for none.
    """

    def __init__(self, centers: Embeddings, bound: int, num_rows: int) -> None:
        self._scan, self._bound = CenterScan(centers), bound
        self.own = np.full(num_rows, -1, np.int32)
        self._scores = np.full(num_rows, -np.inf, np.float32)
        # ties go to the lowest row
        self._least = np.full(len(centers), -np.inf, np.float32)
        self._last = np.full(len(centers), num_rows, np.int64)

    def apply(self, block: Embeddings, row_ids: NDArray[np.int64], width: int) -> None:
        """Lets each row join the nearest center that accepts it, among its `width` nearest centers.

        If none of these accepts the row, more centers are searched.
        """
        max_rows = max(1, _PAIRS // width)
        if len(block) > max_rows:
            for start in range(0, len(block), max_rows):
                self.apply(
                    block[start : start + max_rows], row_ids[start : start + max_rows], width
                )
            return
        neighbors = self._scan.nearest(block, width)
        least = self._least[neighbors.ids]
        accepts = (neighbors.scores > least) | (
            (neighbors.scores == least) & (row_ids[:, None] <= self._last[neighbors.ids])
        )
        choice = accepts.argmax(axis=1)
        is_accepted = accepts[np.arange(len(row_ids)), choice]
        joined, choice = row_ids[is_accepted], choice[is_accepted]
        self.own[joined] = neighbors.ids[is_accepted, choice]
        self._scores[joined] = neighbors.scores[is_accepted, choice]
        if not is_accepted.all():
            wider = min(4 * width, len(self._least))
            self.apply(block[~is_accepted], row_ids[~is_accepted], wider)

    def reject_excess(self) -> NDArray[np.int64]:
        """Keeps the nearest rows of each center, up to the bound, and returns the rejected rows."""
        sizes = np.bincount(self.own, minlength=len(self._least))
        over = np.flatnonzero((sizes > self._bound)[self.own])
        order = over[np.lexsort((over, -self._scores[over], self.own[over]))]
        centers = self.own[order]
        rank = np.arange(len(order)) - np.searchsorted(centers, centers)
        last = order[rank == self._bound - 1]
        self._least[self.own[last]] = self._scores[last]
        self._last[self.own[last]] = last
        rejected = np.sort(order[rank >= self._bound])
        self.own[rejected] = -1
        return rejected


def _totals(rows: Rows, assignment: NDArray[np.int32], num: int) -> ClusterSums:
    totals = ClusterSums.zeros(num, rows.dimension)
    for first, block in rows.blocks(0, rows.num_rows):
        totals.add(block, assignment[first : first + len(block)])
    return totals
