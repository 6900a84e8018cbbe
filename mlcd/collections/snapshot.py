"""A searchable, immutable set of embeddings: a faiss index and the keys of its rows.

index.faiss      the vectors
keys.parquet     key, class_name of each row
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from mlcd.artifact import Artifact, open_artifact
from mlcd.errors import ArtifactInvalid, ConfigInvalid, InvalidInput, NotFound
from mlcd.indexes.base import VectorIndex
from mlcd.types import Embeddings, Fingerprint, SampleKey

INDEX = "index.faiss"
KEYS = "keys.parquet"


@dataclass(frozen=True)
class Match:
    key: SampleKey
    similarity: float
    class_name: str | None


@dataclass(frozen=True)
class Snapshot:
    """One index artifact, opened for search."""

    artifact: Artifact
    index: VectorIndex
    keys: Sequence[SampleKey]
    class_names: Sequence[str | None] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> "Snapshot":
        from mlcd.indexes.faiss import FaissIndex

        artifact = open_artifact(path, "index")
        index = FaissIndex.read(artifact.file(INDEX))
        table = pq.read_table(artifact.file(KEYS))
        if table.num_rows != index.num_rows:
            raise ArtifactInvalid(f"{path} has {index.num_rows} vectors and {table.num_rows} keys")
        return cls(artifact, index, table.column("key").to_pylist(), table.column("class_name").to_pylist())

    @property
    def fingerprint(self) -> Fingerprint:
        if self.artifact.fingerprint is None:
            raise ArtifactInvalid(f"{self.artifact.path} names no model")
        return self.artifact.fingerprint

    def check_fingerprint(self, fingerprint: Fingerprint) -> None:
        if fingerprint != self.fingerprint:
            raise ConfigInvalid(
                f"{self.artifact.path} was embedded by another model ({self.fingerprint[:12]}, served"
                f" {fingerprint[:12]})",
                remedy="embed the images with the served model and run `mlcd index` again",
            )

    def search(self, queries: Embeddings, top: int) -> list[list[Match]]:
        """min(top, size) matches for each unit query, most similar first."""
        if queries.ndim != 2 or queries.shape[1] != self.index.dimension:
            raise InvalidInput(f"the collection has dimension {self.index.dimension}, got {list(queries.shape)}")
        found = self.index.search(queries, min(top, self.index.num_rows))
        return [
            [
                Match(self.keys[row], float(score), self.class_names[row])
                for row, score in zip(ids, scores, strict=True)
                if row >= 0
            ]
            for ids, scores in zip(found.ids, found.scores, strict=True)
        ]

    def embedding_of(self, key: SampleKey) -> Embeddings:
        row = self._row_of_key.get(key)
        if row is None:
            raise NotFound(f"the collection has no item {key[:200]!r}")
        return np.ascontiguousarray(self.index.reconstruct(row), dtype=np.float32)

    @cached_property
    def _row_of_key(self) -> dict[SampleKey, int]:
        return {key: row for row, key in enumerate(self.keys)}
