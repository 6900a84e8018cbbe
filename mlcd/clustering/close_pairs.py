"""Finds exactly the pairs of rows whose cosine reaches a threshold, without comparing all pairs.

A row is compared only with the members of cells that it may be near (`cells`). A second bound then
rules pairs out. Let x_h be the head of x, its components along a few orthonormal directions that
carry most of the rows' length, and |x_r| the length of the remainder. Then

    x.y <= x_h.y_h + |x_r| |y_r|.

The products are in float32. Pairs near the threshold are decided in float64.

Shapes: N rows, D dimension, H components of a head.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.cells import SLACK, PivotCells, Take, find_cells
from mlcd.clustering.exact_scores import exact_scores
from mlcd.clustering.heads import main_directions
from mlcd.types import Embeddings, min_dot_product

_BLOCK_ROWS: Final = 2048
_HEADS: Final = (64, 192)
_SAMPLED_ROWS: Final = 4096
# Shares of a tile's pairs that remain: above _FEW, another product is cheaper than single pairs;
# below _FEWEST, shorter heads are tried.
_FEW: Final = 0.004
_FEWEST: Final = 0.00002
_EXACT_ENTRIES: Final = 1 << 22  # components of whole rows in memory for single pairs

_Rows = NDArray[np.int64]


@dataclass(frozen=True)
class ClosePairs:
    """Pairs of rows, first < second, with their cosines, [n] each."""

    first: _Rows
    second: _Rows
    similarities: NDArray[np.float64]

    @classmethod
    def joined(cls, parts: Sequence["ClosePairs"]) -> "ClosePairs":
        return cls(
            np.concatenate([part.first for part in parts]),
            np.concatenate([part.second for part in parts]),
            np.concatenate([part.similarities for part in parts]),
        )


class PairSearch:
    """The search for all pairs of N unit rows whose cosine is at least `similarity`, cell by cell.

    Memory: one bit per row and cell (at most 256 MiB), 284 bytes per row, 772 more if many rows are
    nearly that close, and single tiles.
    """

    def __init__(
        self,
        num_rows: int,
        take: Take,
        similarity: float,
        *,
        num_own: int | None = None,
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        """num_own: finds only pairs of one of the first `num_own` rows with a later row; None finds
        all pairs. tick: called between tiles; may raise to stop the search.
        """
        self._take, self._num_own = take, num_own
        self._least = max(-1.0, min_dot_product(similarity))
        self._tick = tick
        self.cells: PivotCells = find_cells(num_rows, take, math.acos(self._least), tick=tick)
        dimension = take(np.empty(0, np.int64)).shape[1]
        widths = [width for width in _HEADS if width < dimension and self.cells.num_cells > 1]
        self._stages: list[Take] = [
            *(_Heads(num_rows, take, width, tick) for width in widths),
            take,
        ]
        self._first = 0  # first stage to try on a tile, adapted to the tiles before
        self._pairs_at_once = max(1, _EXACT_ENTRIES // dimension)

    def of_cell(self, cell: int) -> Iterator[ClosePairs]:
        """Yields the pairs of the members of a cell, with each other and with rows of earlier
        cells.
        """
        members = self.cells.members(cell)
        for rows, other_rows in self._sides(members, self.cells.earlier_near(cell)):
            for start in range(0, len(rows), _BLOCK_ROWS):
                first_rows, other_part = rows[start : start + _BLOCK_ROWS], other_rows
                if rows is other_rows:
                    yield self._of_tile(first_rows, first_rows)
                    other_part = other_rows[start + _BLOCK_ROWS :]
                for offset in range(0, len(other_part), _BLOCK_ROWS):
                    yield self._of_tile(first_rows, other_part[offset : offset + _BLOCK_ROWS])

    def _sides(self, members: _Rows, earlier: _Rows) -> Iterator[tuple[_Rows, _Rows]]:
        """Yields (rows, other rows): each row is compared with all of the other rows."""
        if self._num_own is None:
            yield earlier, members
            yield members, members
            return
        own, theirs = members < self._num_own, earlier >= self._num_own
        yield earlier[theirs], members[own]
        yield earlier[~theirs], members[~own]
        yield members[own], members[~own]

    def _of_tile(self, first_rows: _Rows, second_rows: _Rows) -> ClosePairs:
        """Returns each close pair of a first row and a second row once."""
        self._tick()
        for level in range(self._first, len(self._stages)):
            stage = self._stages[level]
            scores = stage(first_rows) @ stage(second_rows).T
            near = scores >= self._least - SLACK
            if first_rows is second_rows:
                near = np.triu(near, 1)
            num_near = np.count_nonzero(near)
            if num_near <= _FEW * near.size:
                break
        self._first = max(0, level - 1) if num_near <= _FEWEST * near.size else level
        at, other_at = np.nonzero(near)
        first_ids, second_ids, pair_scores = (
            first_rows[at],
            second_rows[other_at],
            scores[at, other_at],
        )
        for stage in self._stages[level + 1 :]:
            pair_scores = self._each(
                lambda x, y: np.einsum("nd,nd->n", x, y), stage, first_ids, second_ids
            )
            close = pair_scores >= self._least - SLACK
            first_ids, second_ids, pair_scores = (
                first_ids[close],
                second_ids[close],
                pair_scores[close],
            )
        return self._resolve(first_ids, second_ids, pair_scores.astype(np.float64))

    def _resolve(
        self, first_ids: _Rows, second_ids: _Rows, scores: NDArray[np.float64]
    ) -> ClosePairs:
        """Returns the pairs that reach the similarity. Scores within SLACK of it are computed again
        in float64.
        """

        def exact(rows: Embeddings, other_rows: Embeddings) -> NDArray[np.float64]:
            indices = np.arange(len(rows))
            return exact_scores(rows, other_rows, indices, indices)

        unsure = np.flatnonzero(np.abs(scores - self._least) <= SLACK)
        scores[unsure] = self._each(exact, self._take, first_ids[unsure], second_ids[unsure])
        close = scores >= self._least
        first_ids, second_ids = first_ids[close], second_ids[close]
        return ClosePairs(
            np.minimum(first_ids, second_ids), np.maximum(first_ids, second_ids), scores[close]
        )

    def _each(
        self,
        score: Callable[[Embeddings, Embeddings], NDArray[Any]],
        stage: Take,
        first_ids: _Rows,
        second_ids: _Rows,
    ) -> NDArray[Any]:
        """Returns the score of each pair, [n], reading the rows in parts."""
        parts = [np.empty(0, np.float32)]
        for start in range(0, len(first_ids), self._pairs_at_once):
            part = slice(start, start + self._pairs_at_once)
            parts.append(score(stage(first_ids[part]), stage(second_ids[part])))
        return np.concatenate(parts)


class _Heads:
    """The heads of all rows, each [H + 1], computed at first use. The last number of a head is an
    upper bound of the length of the remainder of its row.
    """

    def __init__(self, num_rows: int, take: Take, width: int, tick: Callable[[], object]) -> None:
        self._num_rows, self._take, self._width, self._tick = num_rows, take, width, tick

    def __call__(self, rows: _Rows) -> Embeddings:
        return self._heads[rows]

    @cached_property
    def _heads(self) -> Embeddings:
        step = max(1, self._num_rows // _SAMPLED_ROWS)
        basis = main_directions(self._take(np.arange(0, self._num_rows, step)), self._width)
        heads = np.empty((self._num_rows, self._width + 1), np.float32)
        for start in range(0, self._num_rows, _BLOCK_ROWS):
            rows = self._take(np.arange(start, min(start + _BLOCK_ROWS, self._num_rows)))
            head = rows @ basis
            squared_tails = np.einsum("nd,nd->n", rows, rows) - np.einsum("nh,nh->n", head, head)
            part = heads[start : start + len(rows)]
            part[:, :-1] = head
            part[:, -1] = np.sqrt(np.maximum(squared_tails, 0) + np.float32(SLACK / 4))
            self._tick()
        return heads
