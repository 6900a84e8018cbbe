"""The interface between a collection and the engine that searches it."""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.types import Embeddings, Neighbors


class VectorIndex(Protocol):
    """A set of vectors that can be searched, in several threads at once; it does not change after
    it is built.

    Rows are numbered in the order in which they were given.
    """

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
        """Returns the rows of highest cosine for each unit query: ids int64 [N, top], -1 where
        there are fewer.

        allowed: bool [num_rows], the rows that may be found; None: all. effort: how far an
        approximate engine looks in this search alone (faiss: efSearch, nprobe); exact engines
        ignore it and find everything.
        """
        ...

    def write(self, path: Path) -> None: ...
