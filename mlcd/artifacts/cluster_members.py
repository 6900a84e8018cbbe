"""The cluster of each clustered row, where that need not be the one of its nearest center.

members.parquet  a row for each clustered row, in their order: key string, cluster int32
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
    numbers: NDArray[np.int64] | None,
    clusters: NDArray[np.int32],
) -> None:
    """Writes the cluster of each row.

    numbers: those of the rows in the embeddings, ascending; None for all.
    """
    numbers = np.arange(len(clusters)) if numbers is None else numbers
    with draft.write(MEMBERS) as path, pq.ParquetWriter(path, _SCHEMA) as writer:
        for start in range(0, len(clusters), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            columns = [embeddings.keys_at(numbers[part]), pa.array(clusters[part])]
            writer.write_table(pa.table(columns, schema=_SCHEMA))
