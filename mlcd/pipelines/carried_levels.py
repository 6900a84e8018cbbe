"""The coarser levels of centers that were changed: a center that stays keeps its path, and a new
one joins the group nearest to it on the finest coarser level, and the groups that this one is of.
"""

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mlcd.artifacts.center_levels import LEVELS, read_level_centers, write_levels
from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Artifact
from mlcd.clustering.novelty import nearest


def carry_levels(before: Artifact, after: Centers, draft: Draft) -> None:
    """Writes the levels of the centers `before`, where they have any, for those since."""
    if LEVELS not in before.files:
        return
    table = pq.read_table(before.file(LEVELS))
    names = [name for name in table.column_names if name.startswith("of_")]
    known = [table[name].to_numpy() for name in names]
    centers = [read_level_centers(before, name) for name in names]
    joined, _ = nearest(after.vectors[len(known[0]) :], centers[0])
    groups: list[NDArray[np.int32]] = []
    for level, group in enumerate(known):
        if level:
            parents = np.empty(len(centers[level - 1]), np.int32)
            parents[known[level - 1]] = group
            joined = parents[joined]
        groups.append(np.concatenate([group, joined]).astype(np.int32))
    write_levels(draft, after.sizes, groups, centers)
