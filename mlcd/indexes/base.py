"""The seam between a collection and the engine that searches it."""

from pathlib import Path
from typing import Protocol

from mlcd.types import Embeddings, Neighbors


class VectorIndex(Protocol):
    """Immutable after it is built; rows are numbered in the order they were given. Safe to search in threads."""

    @property
    def num_rows(self) -> int: ...

    @property
    def dimension(self) -> int: ...

    def search(self, queries: Embeddings, top: int) -> Neighbors:
        """Rows of highest cosine for each unit query: ids int64 [N, top], -1 where there are fewer."""
        ...

    def reconstruct(self, row: int) -> Embeddings:
        """The stored vector of a row: float32 [1, D]."""
        ...

    def write(self, path: Path) -> None: ...
