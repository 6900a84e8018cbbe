"""The oracle of every index, which computes all scores."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlcd.types import Embeddings, Neighbors


class ExactIndex:
    """The `VectorIndex` protocol over a matrix, in the order score descending, row ascending."""

    def __init__(self, rows: Embeddings) -> None:
        self._rows = rows

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def dimension(self) -> int:
        return int(self._rows.shape[1])

    def search(
        self,
        queries: Embeddings,
        top: int,
        *,
        allowed: NDArray[np.bool_] | None = None,
        effort: int | None = None,  # noqa: ARG002 - everything is looked at
    ) -> Neighbors:
        scores = queries.astype(np.float64) @ self._rows.astype(np.float64).T
        num_allowed = len(self._rows)
        if allowed is not None:
            scores[:, ~allowed] = -np.inf
            num_allowed = int(allowed.sum())
        kept = min(top, num_allowed)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :kept]
        ids = np.full((len(queries), top), -1, dtype=np.int64)
        best = np.full((len(queries), top), -np.inf, dtype=np.float32)
        ids[:, :kept] = order
        best[:, :kept] = np.take_along_axis(scores, order, axis=1)
        return Neighbors(ids, best)

    def write(self, path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, self._rows, allow_pickle=False)

    @classmethod
    def read(cls, path: Path) -> "ExactIndex":
        return cls(np.load(path, allow_pickle=False))
