"""The coarser levels of a Centers artifact, for joins with labels.

levels.parquet   a row per center, in the order of ids: id int32, size int64, the cluster on each
                 coarser level as `of_1000` int32, and path, such as "4/17/2031": the cluster ids
                 from the coarsest level down to the center's own id
level-1000.npy   float32 [1000, d], the unit centers of that level
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Artifact
from mlcd.types import Embeddings

LEVELS: Final = "levels.parquet"
_COLUMN_PREFIX: Final = "of_"


def read_groups(centers: Artifact) -> list[NDArray[np.int32]]:
    """Returns the cluster of each center on each coarser level, [K] each, finer before coarser; an
    empty list without levels.
    """
    if LEVELS not in centers.files:
        return []
    table = _read_table(centers)
    names = [name for name in table.column_names if name.startswith(_COLUMN_PREFIX)]
    return [table[name].to_numpy() for name in names]


def write_levels(
    draft: Draft,
    sizes: NDArray[np.int64],
    groups: Sequence[NDArray[np.int32]],
    centers: Sequence[Embeddings],
) -> None:
    """Writes the levels, finer before coarser.

    sizes: [K], members of each of the artifact's centers. groups: for each level, the cluster of
    each center, [K]. centers: for each level, its unit centers.
    """
    # imported here, because both take long to import and most centers have no levels
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    ids = np.arange(len(sizes), dtype=np.int32)
    columns = {
        f"{_COLUMN_PREFIX}{len(level)}": group for level, group in zip(centers, groups, strict=True)
    }
    steps = [pa.array(step).cast(pa.string()) for step in [*groups[::-1], ids]]
    path = pc.binary_join_element_wise(*steps, "/")
    with draft.write(LEVELS) as file:
        pq.write_table(pa.table({"id": ids, "size": sizes, **columns, "path": path}), file)
    for level in centers:
        with draft.write(f"level-{len(level)}.npy") as file, file.open("wb") as stream:
            np.save(stream, level, allow_pickle=False)


def read_level_centers(artifact: Artifact, column: str) -> Embeddings:
    """Returns the centers of the level of a column, such as `of_1000`."""
    centers: Embeddings = np.load(
        artifact.file(f"level-{column.removeprefix(_COLUMN_PREFIX)}.npy"), allow_pickle=False
    )
    return centers


def read_paths(artifact: Artifact) -> tuple[str, ...] | None:
    """Returns the path of each center; None for centers without levels."""
    if LEVELS not in artifact.files:
        return None
    return tuple(_read_table(artifact, ["path"])["path"].to_pylist())


def _read_table(artifact: Artifact, columns: list[str] | None = None) -> pa.Table:
    import pyarrow.parquet as pq

    return pq.read_table(artifact.file(LEVELS), columns=columns)
