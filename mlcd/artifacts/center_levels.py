"""The coarser levels over a Centers artifact, for joins with labels.

levels.parquet   a row for each center, in their order: id int32, size int64, the cluster on each
                 coarser level as `of_1000` int32, and path, as in "4/17/2031": the ids from the
                 coarsest level to the center's own
level-1000.npy   float32 [1000, d], the unit centers of that level
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mlcd.artifacts.draft import Draft
from mlcd.types import Embeddings

LEVELS: Final = "levels.parquet"


def write_levels(
    draft: Draft,
    sizes: NDArray[np.int64],
    groups: Sequence[NDArray[np.int32]],
    centers: Sequence[Embeddings],
) -> None:
    """Writes the levels, finer before coarser.

    sizes: [K], of the artifact's centers. groups: the cluster of each of them, [K] for each level.
    centers: those of each level.
    """
    ids = np.arange(len(sizes), dtype=np.int32)
    columns = {f"of_{len(of)}": group for of, group in zip(centers, groups, strict=True)}
    steps = [pa.array(step).cast(pa.string()) for step in [*groups[::-1], ids]]
    path = pc.binary_join_element_wise(*steps, "/")
    with draft.write(LEVELS) as file:
        pq.write_table(pa.table({"id": ids, "size": sizes, **columns, "path": path}), file)
    for level in centers:
        with draft.write(f"level-{len(level)}.npy") as file, file.open("wb") as opened:
            np.save(opened, level, allow_pickle=False)
