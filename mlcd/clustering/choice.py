"""The choice of the number of clusters: that at which unseen rows are nearest to one center alone.

Half of the rows is clustered, and the others are looked up. Let d1 and d2 be the distances (1 -
cosine) of such a row to its nearest and second nearest center. The separation is the mean of
(d2 - d1) / d2: it falls where clusters are joined, and where one is cut in two. Both halves take
their turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.rows import Rows, SelectedRows
from mlcd.clustering.seeding import sampled
from mlcd.errors import InvalidInput
from mlcd.randomness import hash_counters

_ROWS_OF_A_CLUSTER: Final = 512  # of the sample, of both halves
_STARTS: Final = 2  # of each half; the one of higher objective counts
_SMALL: Final = 1e-7  # a distance that float32 rounds of rows that are the same
_LEAST_ROWS: Final = 8


@dataclass(frozen=True)
class Candidate:
    """A number of clusters. separation: as above. objective, unseen: the mean cosine of the rows
    that were clustered, and of the others, with their nearest centers.
    """

    clusters: int
    separation: float
    objective: float
    unseen: float


def candidates(rows: Rows, nums: Sequence[int], *, seed: int = 0) -> list[Candidate]:
    """Measures unit rows at each number of clusters. Raises InvalidInput for fewer than 2, or for
    more than a quarter of the rows.
    """
    if rows.num_rows < _LEAST_ROWS:
        raise InvalidInput(
            f"numbers of clusters cannot be compared on {rows.num_rows} rows",
            remedy=f"give {_LEAST_ROWS} rows or more, or the number of clusters",
        )
    if min(nums) < 2 or 4 * max(nums) > rows.num_rows:
        raise InvalidInput(
            f"{', '.join(map(str, nums))} clusters cannot be compared on {rows.num_rows} rows",
            remedy=f"give numbers from 2 to {rows.num_rows // 4}",
        )
    return [_measure(sampled(rows, _ROWS_OF_A_CLUSTER * num, seed), num, seed) for num in nums]


def best(measured: Sequence[Candidate]) -> int:
    """Returns the number of clusters of highest separation; of equals the first."""
    return max(measured, key=lambda candidate: candidate.separation).clusters


def _measure(rows: Rows, num: int, seed: int) -> Candidate:
    numbers = np.arange(rows.num_rows)
    # the rows of lowest hash, so that both halves are equally large
    halves = np.array_split(np.argsort(hash_counters(seed, numbers), kind="stable"), 2)
    first, second = (SelectedRows(rows, np.sort(half)) for half in halves)
    sums, objectives = np.zeros(2), []
    for own, other_half in ((first, second), (second, first)):
        starts = (kmeans(own, num, seed=seed + start) for start in range(_STARTS))
        result = max(starts, key=lambda start: start.objective[-1])
        objectives.append(result.objective[-1])
        scan = CenterScan(result.centers)
        for _, block in other_half.blocks(0, other_half.num_rows):
            scores = scan.nearest(block, 2).scores.astype(np.float64)
            near, next_to = np.maximum(1 - scores.T, 0)
            apart = next_to > _SMALL  # else the row lies on both centers
            sums += [(1 - near[apart] / next_to[apart]).sum(), scores[:, 0].sum()]
    separation, unseen = (sums / rows.num_rows).tolist()
    return Candidate(num, separation, float(np.mean(objectives)), unseen)
