"""Clusters of bounded size: a full center keeps its nearest rows, and the others go to the nearest
center that takes them.

Take all pairs of a row and a center by score descending, and let each row join the first center
that has room. This is the one stable assignment (Gale and Shapley, 1962): no row is nearer to
another center that has room or holds a row less near to it. It is found without the pairs: every
row asks its nearest center; a center with too many keeps its nearest `bound` and from then on takes
only nearer rows; the others ask on. The answer does not depend on the order in which rows ask.

Assignment and means take turns, as in k-means, and the best turn counts. Memory is 16 bytes a row
beside the centers and their sums.
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
# of each row the center and the score, beside its centers in k-means and in the best turn
BOUNDED_ROW_BYTES: Final = 16
_SLACK: Final = 1.25  # the bound where none is given, in mean sizes
_TOLERANCE: Final = 1e-4  # relative gain of the objective below which the turns end
_PAIRS: Final = 1 << 20  # of a row and a center, looked up at once: 40 MiB
_ASKED: Final = 16  # nearest centers that are looked up at once for a row that was turned away


def checked_bound(num_rows: int, num_clusters: int, largest: int | None) -> int:
    """Returns how many rows a cluster may hold: `largest`, or a quarter more than the mean.

    Raises InvalidInput where the clusters cannot hold all rows.
    """
    if largest is None:
        return int(np.ceil(_SLACK * num_rows / num_clusters))
    if largest * num_clusters < num_rows:
        raise InvalidInput(
            f"{num_clusters} clusters of at most {largest} rows cannot hold {num_rows}",
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
    """Returns clusters of unit rows with at most `bound` rows each, from those of k-means on.

    The assignment is the stable one to the centers that are returned. on_turn: is called with the
    objective of each turn.
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
    """Returns the center of each unit row, [N] int32; no center has more than `bound` rows, which
    have to suffice for all.
    """
    doors = _Doors(centers, bound, rows.num_rows)
    for first, block in rows.blocks(0, rows.num_rows):
        doors.ask(block, np.arange(first, first + len(block)), 1)
    while len(turned_away := doors.close()):
        for start in range(0, len(turned_away), BLOCK_ROWS):
            numbers = turned_away[start : start + BLOCK_ROWS]
            doors.ask(rows.read(numbers), numbers, min(_ASKED, len(centers)))
    return doors.own


class _Doors:
    """The center that each row is with, and the last row that each full center takes.

    own: [N] int32, -1 for none.
    """

    def __init__(self, centers: Embeddings, bound: int, num_rows: int) -> None:
        self._scan, self._bound = CenterScan(centers), bound
        self.own = np.full(num_rows, -1, np.int32)
        self._scores = np.full(num_rows, -np.inf, np.float32)
        # of equal scores the lower row is taken
        self._least = np.full(len(centers), -np.inf, np.float32)
        self._last = np.full(len(centers), num_rows, np.int64)

    def ask(self, block: Embeddings, numbers: NDArray[np.int64], width: int) -> None:
        """Lets rows join the nearest center that takes them, of the `width` nearest or, where none
        of these does, of more.
        """
        most = max(1, _PAIRS // width)
        if len(block) > most:
            for start in range(0, len(block), most):
                self.ask(block[start : start + most], numbers[start : start + most], width)
            return
        neighbors = self._scan.nearest(block, width)
        least = self._least[neighbors.ids]
        takes = (neighbors.scores > least) | (
            (neighbors.scores == least) & (numbers[:, None] <= self._last[neighbors.ids])
        )
        choice = takes.argmax(axis=1)
        is_taken = takes[np.arange(len(numbers)), choice]
        joined, choice = numbers[is_taken], choice[is_taken]
        self.own[joined] = neighbors.ids[is_taken, choice]
        self._scores[joined] = neighbors.scores[is_taken, choice]
        if not is_taken.all():
            wider = min(4 * width, len(self._least))
            self.ask(block[~is_taken], numbers[~is_taken], wider)

    def close(self) -> NDArray[np.int64]:
        """Leaves each center its nearest rows, as many as it may have, and returns the others."""
        sizes = np.bincount(self.own, minlength=len(self._least))
        over = np.flatnonzero((sizes > self._bound)[self.own])
        order = over[np.lexsort((over, -self._scores[over], self.own[over]))]
        centers = self.own[order]
        rank = np.arange(len(order)) - np.searchsorted(centers, centers)
        last = order[rank == self._bound - 1]
        self._least[self.own[last]] = self._scores[last]
        self._last[self.own[last]] = last
        turned_away = np.sort(order[rank >= self._bound])
        self.own[turned_away] = -1
        return turned_away


def _totals(rows: Rows, assignment: NDArray[np.int32], num: int) -> ClusterSums:
    totals = ClusterSums.zeros(num, rows.dimension)
    for first, block in rows.blocks(0, rows.num_rows):
        totals.add(block, assignment[first : first + len(block)])
    return totals
