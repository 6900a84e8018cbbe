"""The seam between a collection and the engine that searches it."""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.types import Embeddings, Neighbors


class VectorIndex(Protocol):
    """Immutable after it is built; rows are numbered in the order they were given. Safe to search in threads."""

    @property
    def num_rows(self) -> int: ...

    @property
    def dimension(self) -> int: ...

    def search(
        self,
        queries: Embeddings,
        top: int,
        *,
        allowed: NDArray[np.bool_] | None = None,
        effort: int | None = None,
    ) -> Neighbors:
        """Rows of highest cosine for each unit query: ids int64 [N, top], -1 where there are fewer.

        allowed: bool [num_rows], the rows that may be found; None: all. effort: how far an approximate engine looks
        (faiss: efSearch, nprobe) in this search alone; exact engines have no use for it and find everything.
        """
        ...

    def write(self, path: Path) -> None: ...
