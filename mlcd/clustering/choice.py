"""Chooses the number of clusters with the best separation on held-out rows.

Half of the rows is clustered, and the other half is held out. Let d1 and d2 be the distances (1 -
cosine) of a held-out row to its nearest and second nearest center. The separation is the mean of
(d2 - d1) / d2: it falls if clusters are merged, and if a cluster is split. Then the halves are
swapped.
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

_ROWS_PER_CLUSTER: Final = 512  # sampled rows, of both halves together
_STARTS: Final = 2  # per half; the start with the higher objective is used
_SMALL: Final = 1e-7  # distance between equal rows after float32 rounding
_LEAST_ROWS: Final = 8


@dataclass(frozen=True)
class Candidate:
    """A number of clusters. separation: as above. objective, unseen: mean cosine with the nearest
    center, of the clustered rows and of the held-out rows.
    """

    clusters: int
    separation: float
    objective: float
    unseen: float


def candidates(rows: Rows, nums: Sequence[int], *, seed: int = 0) -> list[Candidate]:
    """Clusters unit rows into each of `nums` clusters and measures the results.

    Raises InvalidInput for a number below 2 or above a quarter of the rows.
    """
    if rows.num_rows < _LEAST_ROWS:
        raise InvalidInput(
            f"choosing a number of clusters needs {_LEAST_ROWS} rows, got {rows.num_rows}",
            remedy="add rows, or give the number of clusters",
        )
    if min(nums) < 2 or 4 * max(nums) > rows.num_rows:
        raise InvalidInput(
            f"{', '.join(map(str, nums))} clusters cannot be compared on {rows.num_rows} rows",
            remedy=f"give numbers from 2 to {rows.num_rows // 4}",
        )
    return [_measure(sampled(rows, _ROWS_PER_CLUSTER * num, seed), num, seed) for num in nums]


def best(measured: Sequence[Candidate]) -> int:
    """Returns the number of clusters of highest separation; ties go to the first."""
    return max(measured, key=lambda candidate: candidate.separation).clusters


def _measure(rows: Rows, num: int, seed: int) -> Candidate:
    row_ids = np.arange(rows.num_rows)
    # split by the order of hashes, so that both halves have the same size
    halves = np.array_split(np.argsort(hash_counters(seed, row_ids), kind="stable"), 2)
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
            apart = next_to > _SMALL  # otherwise the row lies on both centers
            sums += [(1 - near[apart] / next_to[apart]).sum(), scores[:, 0].sum()]
    separation, unseen = (sums / rows.num_rows).tolist()
    return Candidate(num, separation, float(np.mean(objectives)), unseen)
