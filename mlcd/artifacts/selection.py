"""The selection artifact: which images of an embeddings artifact are kept.

decisions.parquet  key, keep, reason (null if the image is kept) and group: the id of the image's
                   group of near duplicates, null outside of groups
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifacts.manifest import Artifact, open_artifact

DECISIONS: Final = "decisions.parquet"
SELECTION_SCHEMA: Final = pa.schema(
    [
        ("key", pa.large_string()),
        ("keep", pa.bool_()),
        ("reason", pa.string()),
        ("group", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Selection:
    """A reader of a selection artifact."""

    artifact: Artifact

    @classmethod
    def open(cls, path: Path, *, verify_files: bool = True) -> "Selection":
        return cls(open_artifact(path, "selection", verify_files=verify_files))

    def decisions(self) -> pa.Table:
        return pq.read_table(self.artifact.file(DECISIONS), schema=SELECTION_SCHEMA)

    def read_keys(self) -> pa.ChunkedArray:
        """Returns the keys of the kept images, in the order of the embeddings."""
        table = pq.read_table(
            self.artifact.file(DECISIONS), columns=["key", "keep"], schema=SELECTION_SCHEMA
        )
        return table.filter(table["keep"])["key"]
