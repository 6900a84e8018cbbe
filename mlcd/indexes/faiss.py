"""FAISS, exact: a flat index of inner products. The only importer of faiss for retrieval."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from mlcd.errors import ArtifactInvalid
from mlcd.types import Embeddings, Neighbors


class FaissIndex:
    """The `VectorIndex` protocol over a faiss index of inner products."""

    def __init__(self, index: Any) -> None:
        self._index = index

    @classmethod
    def build(cls, blocks: Iterable[Embeddings], *, dimension: int) -> "FaissIndex":
        index = faiss.IndexFlatIP(dimension)
        for block in blocks:
            index.add(np.ascontiguousarray(block, dtype=np.float32))
        return cls(index)

    @property
    def num_rows(self) -> int:
        return int(self._index.ntotal)

    @property
    def dimension(self) -> int:
        return int(self._index.d)

    def search(self, queries: Embeddings, top: int) -> Neighbors:
        scores, ids = self._index.search(np.ascontiguousarray(queries, dtype=np.float32), top)
        scores[ids < 0] = -np.inf
        order = np.lexsort((ids, -scores), axis=1)
        return Neighbors(np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1))

    def reconstruct(self, row: int) -> Embeddings:
        vector: Embeddings = self._index.reconstruct(row)[None]
        return vector

    def write(self, path: Path) -> None:
        faiss.write_index(self._index, str(path))

    @classmethod
    def read(cls, path: Path) -> "FaissIndex":
        try:
            return cls(faiss.read_index(str(path)))
        except RuntimeError as error:
            raise ArtifactInvalid(
                f"{path} is not a readable index", remedy="build it again with `mlcd index`"
            ) from error
