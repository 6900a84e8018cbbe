"""The cluster of each clustered row, for clusterings in which it may differ from the cluster of the
nearest center.

members.parquet  a row per clustered row, in the same order: key string, cluster int32
"""

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.embeddings import EmbeddingsArtifact

MEMBERS: Final = "members.parquet"
_SCHEMA: Final = pa.schema([("key", pa.large_string()), ("cluster", pa.int32())])
_ROWS_AT_ONCE: Final = 1 << 20


def write_members(
    draft: Draft,
    embeddings: EmbeddingsArtifact,
    row_ids: NDArray[np.int64] | None,
    clusters: NDArray[np.int32],
) -> None:
    """Writes the cluster of each row.

    row_ids: ids of the clustered rows in the embeddings, ascending; None for all.
    """
    row_ids = np.arange(len(clusters)) if row_ids is None else row_ids
    with draft.write(MEMBERS) as path, pq.ParquetWriter(path, _SCHEMA) as writer:
        for start in range(0, len(clusters), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            columns = [embeddings.keys_at(row_ids[part]), pa.array(clusters[part])]
            writer.write_table(pa.table(columns, schema=_SCHEMA))
