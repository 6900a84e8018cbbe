"""The groups of items that are nearly the same, by the cosine of their embeddings.

Pairs are found cell by cell (`mlcd.clustering.close_pairs`) and joined at once; two numbers are
kept for each row. Two items are in one group where a chain of pairs above the similarity joins
them, so the ends of a long chain may be less alike than that. Equal rows are joined without a
comparison.
"""

import hashlib
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.disk import replacing
from mlcd.clustering.cells import Take
from mlcd.clustering.close_pairs import ClosePairs, PairSearch
from mlcd.errors import InvalidInput
from mlcd.progress import Meter
from mlcd.types import Embeddings, cosines

DEFAULT_SIMILARITY: Final = 0.95
_DIGITS: Final = 6  # float32 holds no more
_BLOCK_ROWS: Final = 4096
_PAIRS_TOGETHER: Final = 1 << 20
_NO_COSINE: Final = -2.0  # of a row that no pair has
_NOTE_S: Final = 10.0  # a killed search does so much again at most


@dataclass(frozen=True)
class Group:
    """A group of near duplicates.

    rows: two or more, ascending, int64 [n]. similarities: that of each row to the most similar
    other one.
    """

    rows: NDArray[np.int64]
    similarities: NDArray[np.float32]

    def record(self, ids: Sequence[str]) -> dict[str, Any]:
        """Returns the group in the form that users get. ids: those of all rows."""
        similarities = [round(similarity, _DIGITS) for similarity in self.similarities.tolist()]
        return {"ids": [ids[row] for row in self.rows], "similarities": similarities}


def duplicate_groups(
    num_rows: int,
    take: Take,
    similarity: float,
    *,
    meter: Meter,
    note: Path | None = None,
) -> list[Group]:
    """Returns all groups of unit rows, ordered by their first row.

    The meter advances by rows, and is called often. note: the file that the search is noted in from
    time to time, from which it goes on after its process was killed. Raises InvalidInput.
    """
    if not -1 <= similarity <= 1:
        raise InvalidInput(f"the similarity must be a cosine in [-1, 1], got {similarity:g}")
    distinct = DistinctRows.of(num_rows, take)
    meter.advance(num_rows - len(distinct))
    search = PairSearch(len(distinct), distinct.take, similarity, tick=lambda: meter.advance(0))
    joined = _Joined.of(len(distinct), search, similarity, note)
    meter.advance(joined.num_rows_before(search))
    for cell in joined.search_missing(search):
        meter.advance(int(np.diff(search.cells.starts[[joined.num_cells, cell]])[0]))
        joined.num_cells = cell
        joined.write_now_and_then()
    return distinct.spread(joined.group, joined.best)


@dataclass(frozen=True)
class DistinctRows:
    """The rows that equal no earlier one.

    rows: their numbers, [M]. first_of: the first row that each of all rows is equal to, [N].
    """

    rows: NDArray[np.int64]
    first_of: NDArray[np.int64]
    take_any: Take

    @classmethod
    def of(cls, num_rows: int, take: Take) -> "DistinctRows":
        first_of = _equal_rows(num_rows, take)
        return cls(np.flatnonzero(first_of == np.arange(num_rows)), first_of, take)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: NDArray[np.int64]) -> Embeddings:
        """Returns the vectors of distinct rows by their number among these."""
        return self.take_any(self.rows[rows])

    def groups(self, pairs: ClosePairs) -> list[Group]:
        """Returns the groups that pairs of distinct rows join, and equal rows."""
        joined = _Joined(
            np.arange(len(self), dtype=np.int64), np.full(len(self), _NO_COSINE, np.float32)
        )
        joined.add(pairs)
        return self.spread(joined.group, joined.best)

    def spread(self, group: NDArray[np.int64], best: NDArray[np.float32]) -> list[Group]:
        """Returns the groups of all rows. group, best: of the distinct ones, as in `_Joined`."""
        number_of = np.searchsorted(self.rows, self.first_of)
        copies = np.bincount(number_of, minlength=len(self))[number_of] > 1
        similarities = np.where(copies, np.float32(1), best[number_of])
        return [Group(rows, similarities[rows]) for rows in _members(group[number_of])]


def _equal_rows(num_rows: int, take: Take) -> NDArray[np.int64]:
    """Returns the first row that each row is equal to, [N]."""
    hashes = np.empty(num_rows, np.int64)
    for start in range(0, num_rows, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, num_rows)
        hashes[start:stop] = [hash(row.tobytes()) for row in take(np.arange(start, stop))]
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    first_of: NDArray[np.int64] = first[inverse].astype(np.int64)
    later = np.flatnonzero(first_of != np.arange(num_rows))
    for start in range(0, len(later), _BLOCK_ROWS):
        block = later[start : start + _BLOCK_ROWS]
        equal = (take(block) == take(first_of[block])).all(axis=1)
        first_of[block[~equal]] = block[~equal]  # two rows that share a hash by chance
    return first_of


@dataclass
class _Joined:
    """The groups that the pairs of the first cells join.

    group: [N], the lowest row of each row's group. best: float32 [N], the highest cosine of each
    row with another. state: what the note is of.
    """

    group: NDArray[np.int64]
    best: NDArray[np.float32]
    num_cells: int = 0
    note: Path | None = None
    state: str = ""
    noted_s: float = 0.0

    @classmethod
    def of(cls, num: int, search: PairSearch, similarity: float, note: Path | None) -> "_Joined":
        """Returns what the note tells of this very search, or no groups."""
        cells = hashlib.sha256(search.cells.of_row.tobytes()).hexdigest()
        joined = cls(
            np.arange(num, dtype=np.int64),
            np.full(num, _NO_COSINE, np.float32),
            0,
            note,
            f"{cells} {similarity!r}",
            time.monotonic(),
        )
        joined._read()
        return joined

    def _read(self) -> None:
        if self.note is None or not self.note.is_file():
            return
        try:
            with self.note.open("rb") as file, np.load(file, allow_pickle=False) as noted:
                if str(noted["state"]) == self.state:
                    self.group, self.best = noted["group"], noted["best"]
                    self.num_cells = int(noted["num_cells"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return  # a damaged note is no more than none

    def num_rows_before(self, search: PairSearch) -> int:
        return int(search.cells.starts[self.num_cells])

    def write_now_and_then(self) -> None:
        if self.note is None or time.monotonic() - self.noted_s < _NOTE_S:
            return
        with replacing(self.note) as temporary, temporary.open("wb") as file:
            np.savez(
                file,
                group=self.group,
                best=self.best,
                num_cells=self.num_cells,
                state=np.array(self.state),
            )
        self.noted_s = time.monotonic()

    def search_missing(self, search: PairSearch) -> Iterator[int]:
        """Takes in the pairs of the cells that are missing; yields the number of those searched."""
        for cell in range(self.num_cells, search.cells.num_cells):
            for pairs in _gather(search.of_cell(cell)):
                self.add(pairs)
            yield cell + 1

    def add(self, pairs: ClosePairs) -> None:
        similarities = cosines(pairs.similarities)
        for rows in (pairs.first, pairs.second):
            np.maximum.at(self.best, rows, similarities)
        _join(self.group, pairs.first, pairs.second)


def _gather(parts: Iterator[ClosePairs]) -> Iterator[ClosePairs]:
    """Joins many small parts into few large ones."""
    batch: list[ClosePairs] = []
    num = 0
    for part in parts:
        batch.append(part)
        num += len(part.first)
        if num > _PAIRS_TOGETHER:
            yield ClosePairs.joined(batch)
            batch, num = [], 0
    if num:
        yield ClosePairs.joined(batch)


def _join(group: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64]) -> None:
    """Joins the two groups of each pair into one, named by its lowest row.

    Every name points at itself, before and after.
    """
    while True:
        first_names, second_names = group[first], group[second]
        apart = first_names != second_names
        if not apart.any():
            return
        np.minimum.at(
            group,
            np.maximum(first_names, second_names)[apart],
            np.minimum(first_names, second_names)[apart],
        )
        while (group[group] != group).any():
            group[:] = group[group]


def _members(group: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    order = np.argsort(group, kind="stable")
    _, starts, counts = np.unique(group[order], return_index=True, return_counts=True)
    for start, count in zip(starts[counts > 1], counts[counts > 1], strict=True):
        yield order[start : start + count]
