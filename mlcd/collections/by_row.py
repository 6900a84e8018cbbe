"""Values that are computed of every item of a collection, by the ledger's row, and kept in a file.

A row stands for one vector for ever, so a value that was computed once stays right. The file is a
shortcut and no source of truth: one that is missing or damaged is made again.
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

# compute(vectors [n, D]) returns the value of each, [n, …]
Compute: TypeAlias = Callable[[Embeddings], NDArray[Any]]


@dataclass(frozen=True)
class ByRow:
    """Values by row. rows: int64 [N], ascending. values: [N, …]."""

    rows: NDArray[np.int64]
    values: NDArray[Any]

    @classmethod
    def nothing(cls, like: NDArray[Any]) -> "ByRow":
        return cls(np.empty(0, dtype=np.int64), like[:0])

    def extend(self, searcher: Searcher, compute: Compute) -> "ByRow":
        """Returns the values of exactly the searcher's items; only new ones are computed."""
        positions = np.flatnonzero(searcher.alive)
        rows = searcher.rows[positions]
        order = np.argsort(rows)
        positions, rows = positions[order], rows[order]
        places, is_known = self._places(rows)
        values = np.empty((len(rows), *self.values.shape[1:]), dtype=self.values.dtype)
        values[is_known] = self.values[places[is_known]]
        lacking = np.flatnonzero(~is_known)
        for start in range(0, len(lacking), _BLOCK_ROWS):
            block = lacking[start : start + _BLOCK_ROWS]
            values[block] = compute(searcher.vectors(positions[block]))
        return ByRow(rows, values)

    def at(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Returns the values of rows that it has, in their order."""
        return self.values[np.searchsorted(self.rows, rows)]

    def num_lacking(self, rows: NDArray[np.int64]) -> int:
        """Returns how many of the rows it does not have."""
        return int((~self._places(rows)[1]).sum())

    def _places(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        places = np.searchsorted(self.rows, rows)
        is_known = places < len(self.rows)
        is_known[is_known] = self.rows[places[is_known]] == rows[is_known]
        return places, is_known


def read_by_row(path: Path, like: NDArray[Any]) -> ByRow:
    """Returns what was written to the file, or nothing. like: an array of the values' kind."""
    if not path.is_file():
        return ByRow.nothing(like)
    try:
        # numpy itself leaves the file open where it is damaged
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
        _log.warning("%s is damaged and made again: %s", path, error)
    return ByRow.nothing(like)


def write_by_row(path: Path, table: ByRow) -> None:
    """Writes the table in place of an earlier one, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, rows=table.rows, values=table.values)
