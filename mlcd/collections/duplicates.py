"""Groups of near-duplicate items, by the cosine of their embeddings.

Pairs are searched cell by cell (`mlcd.clustering.close_pairs`) and merged into groups immediately,
so memory holds only two numbers per row. A chain of pairs above the threshold forms one group, so
the ends of a long chain may be below it. Equal rows are grouped without a search.
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
_DIGITS: Final = 6  # decimals; float32 has no more
_BLOCK_ROWS: Final = 4096
_BATCH_PAIRS: Final = 1 << 20
_NO_COSINE: Final = -2.0  # of a row without a pair
_CHECKPOINT_INTERVAL_S: Final = 10.0  # a killed search repeats at most this much


@dataclass(frozen=True)
class Group:
    """A group of near duplicates.

    rows: two or more rows, ascending, int64 [n]. similarities: cosine of each row and the row most
    similar to it, [n].
    """

    rows: NDArray[np.int64]
    similarities: NDArray[np.float32]

    def record(self, ids: Sequence[str]) -> dict[str, Any]:
        """Returns the group as users receive it. ids: ids of all rows."""
        similarities = [round(similarity, _DIGITS) for similarity in self.similarities.tolist()]
        return {"ids": [ids[row] for row in self.rows], "similarities": similarities}


def duplicate_groups(
    num_rows: int,
    take: Take,
    similarity: float,
    *,
    meter: Meter,
    checkpoint: Path | None = None,
) -> list[Group]:
    """Returns all groups of unit rows, ordered by their first row.

    take: returns the vectors of row indices. similarity: minimum cosine of a pair. meter: advanced
    by rows, also by 0 so that it can cancel. checkpoint: file from which a killed search resumes.
    Raises InvalidInput.
    """
    if not -1 <= similarity <= 1:
        raise InvalidInput(f"the similarity must be a cosine in [-1, 1], got {similarity:g}")
    distinct = DistinctRows.of(num_rows, take)
    meter.advance(num_rows - len(distinct))
    search = PairSearch(len(distinct), distinct.take, similarity, tick=lambda: meter.advance(0))
    grouping = _GroupSearch.of(len(distinct), search, similarity, checkpoint)
    meter.advance(grouping.num_rows_before(search))
    for num_searched in grouping.search_missing(search):
        meter.advance(int(np.diff(search.cells.starts[[grouping.num_cells, num_searched]])[0]))
        grouping.num_cells = num_searched
        grouping.write_if_due()
    return distinct.expand_groups(grouping.group, grouping.best)


@dataclass(frozen=True)
class DistinctRows:
    """The rows that do not equal an earlier row.

    rows: indices of the distinct rows, [M]. first_of: for each row, the first row equal to it, [N].
    take_any: returns the vectors of any rows.
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
        """Returns vectors by index into the distinct rows."""
        return self.take_any(self.rows[rows])

    def groups(self, pairs: ClosePairs) -> list[Group]:
        """Returns the groups formed by pairs of distinct rows and by equal rows."""
        grouping = _GroupSearch(
            np.arange(len(self), dtype=np.int64), np.full(len(self), _NO_COSINE, np.float32)
        )
        grouping.add(pairs)
        return self.expand_groups(grouping.group, grouping.best)

    def expand_groups(self, group: NDArray[np.int64], best: NDArray[np.float32]) -> list[Group]:
        """Returns the groups of all rows. group, best: of distinct rows, see `_GroupSearch`."""
        index_of = np.searchsorted(self.rows, self.first_of)
        has_equal = np.bincount(index_of, minlength=len(self))[index_of] > 1
        similarities = np.where(has_equal, np.float32(1), best[index_of])
        return [Group(rows, similarities[rows]) for rows in _members(group[index_of])]


def _equal_rows(num_rows: int, take: Take) -> NDArray[np.int64]:
    """Returns for each row the first row equal to it, [N]."""
    hashes = np.empty(num_rows, np.int64)
    for start in range(0, num_rows, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, num_rows)
        hashes[start:stop] = [hash(row.tobytes()) for row in take(np.arange(start, stop))]
    _, first_rows, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    first_of: NDArray[np.int64] = first_rows[inverse].astype(np.int64)
    candidates = np.flatnonzero(first_of != np.arange(num_rows))
    for start in range(0, len(candidates), _BLOCK_ROWS):
        block = candidates[start : start + _BLOCK_ROWS]
        equal = (take(block) == take(first_of[block])).all(axis=1)
        first_of[block[~equal]] = block[~equal]  # a hash collision
    return first_of


@dataclass
class _GroupSearch:
    """The groups formed by the pairs of the first `num_cells` cells; can be checkpointed.

    group: lowest row of each row's group, [N]. best: highest cosine of each row with another row,
    float32 [N]. checkpoint: its file. state: identifies the search that the checkpoint belongs to.
    """

    group: NDArray[np.int64]
    best: NDArray[np.float32]
    num_cells: int = 0
    checkpoint: Path | None = None
    state: str = ""
    saved_at_s: float = 0.0

    @classmethod
    def of(
        cls, num: int, search: PairSearch, similarity: float, checkpoint: Path | None
    ) -> "_GroupSearch":
        """Restores the checkpoint if it belongs to this search; otherwise starts without groups."""
        cells = hashlib.sha256(search.cells.of_row.tobytes()).hexdigest()
        grouping = cls(
            np.arange(num, dtype=np.int64),
            np.full(num, _NO_COSINE, np.float32),
            0,
            checkpoint,
            f"{cells} {similarity!r}",
            time.monotonic(),
        )
        grouping._read_checkpoint()
        return grouping

    def _read_checkpoint(self) -> None:
        if self.checkpoint is None or not self.checkpoint.is_file():
            return
        try:
            with self.checkpoint.open("rb") as file, np.load(file, allow_pickle=False) as saved:
                if str(saved["state"]) == self.state:
                    self.group, self.best = saved["group"], saved["best"]
                    self.num_cells = int(saved["num_cells"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return  # A damaged checkpoint counts as missing.

    def num_rows_before(self, search: PairSearch) -> int:
        return int(search.cells.starts[self.num_cells])

    def write_if_due(self) -> None:
        if self.checkpoint is None or time.monotonic() - self.saved_at_s < _CHECKPOINT_INTERVAL_S:
            return
        with replacing(self.checkpoint) as temporary, temporary.open("wb") as file:
            np.savez(
                file,
                group=self.group,
                best=self.best,
                num_cells=self.num_cells,
                state=np.array(self.state),
            )
        self.saved_at_s = time.monotonic()

    def search_missing(self, search: PairSearch) -> Iterator[int]:
        """Adds the pairs of the cells not searched yet; yields the number of searched cells."""
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
    """Concatenates small parts into batches of about `_BATCH_PAIRS` pairs."""
    batch: list[ClosePairs] = []
    num = 0
    for part in parts:
        batch.append(part)
        num += len(part.first)
        if num > _BATCH_PAIRS:
            yield ClosePairs.joined(batch)
            batch, num = [], 0
    if num:
        yield ClosePairs.joined(batch)


def _join(group: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64]) -> None:
    """Merges the groups of each pair, in place (union-find). A group is named by its lowest row,
    so group[group] == group before and after.
    """
    while True:
        first_names, second_names = group[first], group[second]
        differ = first_names != second_names
        if not differ.any():
            return
        np.minimum.at(
            group,
            np.maximum(first_names, second_names)[differ],
            np.minimum(first_names, second_names)[differ],
        )
        while (group[group] != group).any():
            group[:] = group[group]


def _members(group: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yields the rows of each group of two or more."""
    order = np.argsort(group, kind="stable")
    _, starts, counts = np.unique(group[order], return_index=True, return_counts=True)
    for start, count in zip(starts[counts > 1], counts[counts > 1], strict=True):
        yield order[start : start + count]
