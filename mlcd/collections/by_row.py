"""A cache of values computed from the vectors of a collection, by row of the ledger, in a file.

A row number always means the same vector, so a cached value never becomes stale. A missing or
damaged file is computed again.
"""

import logging
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.disk import replacing
from mlcd.collections.searcher import Searcher
from mlcd.types import Embeddings

_BLOCK_ROWS: Final = 8192
_log = logging.getLogger("mlcd.collections")

# compute(vectors [n, D]) returns the value of each vector, [n, …]
Compute: TypeAlias = Callable[[Embeddings], NDArray[Any]]


@dataclass(frozen=True)
class ByRow:
    """Cached values. rows: int64 [N], ascending. values: [N, …]."""

    rows: NDArray[np.int64]
    values: NDArray[Any]

    @classmethod
    def empty(cls, like: NDArray[Any]) -> "ByRow":
        """Returns an empty cache. like: array with the values' dtype and trailing shape."""
        return cls(np.empty(0, dtype=np.int64), like[:0])

    def extend(self, searcher: Searcher, compute: Compute) -> "ByRow":
        """Returns the values of exactly the searcher's items; computes only missing values."""
        positions = np.flatnonzero(searcher.alive)
        rows = searcher.rows[positions]
        order = np.argsort(rows)
        positions, rows = positions[order], rows[order]
        indices, is_cached = self._find(rows)
        values = np.empty((len(rows), *self.values.shape[1:]), dtype=self.values.dtype)
        values[is_cached] = self.values[indices[is_cached]]
        missing = np.flatnonzero(~is_cached)
        for start in range(0, len(missing), _BLOCK_ROWS):
            block = missing[start : start + _BLOCK_ROWS]
            values[block] = compute(searcher.vectors(positions[block]))
        return ByRow(rows, values)

    def at(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Returns the values of the rows, in the order given. All rows must be cached."""
        return self.values[np.searchsorted(self.rows, rows)]

    def num_missing(self, rows: NDArray[np.int64]) -> int:
        """Returns how many of the rows are not cached."""
        return int((~self._find(rows)[1]).sum())

    def _find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the index of each row, and whether it is cached, [n] each."""
        indices = np.searchsorted(self.rows, rows)
        is_cached = indices < len(self.rows)
        is_cached[is_cached] = self.rows[indices[is_cached]] == rows[is_cached]
        return indices, is_cached


def read_by_row(path: Path, like: NDArray[Any]) -> ByRow:
    """Reads the file; returns an empty cache if it is missing, damaged, or of another dtype or
    shape than `like`.
    """
    if not path.is_file():
        return ByRow.empty(like)
    try:
        # np.load leaves a damaged file open if it is given the path.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            by_row = ByRow(stored["rows"], stored["values"])
        same = by_row.values.dtype == like.dtype and by_row.values.shape[1:] == like.shape[1:]
        if (
            same
            and by_row.rows.shape == by_row.values.shape[:1]
            and (np.diff(by_row.rows) > 0).all()
        ):
            return by_row
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _log.warning("%s is damaged and will be computed again: %s", path, error)
    return ByRow.empty(like)


def write_by_row(path: Path, table: ByRow) -> None:
    """Writes the table atomically, replacing an earlier file."""
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, rows=table.rows, values=table.values)
