"""The state of a collection that readers hold; it never changes and is replaced as a whole.

Positions number the known items: first those of the index, then the delta, which is scanned. A
deleted or replaced position is dead. The arrays are only appended to, beyond the positions that
this state has: a reader neither waits for a writer nor sees half of its work. Shapes: Q queries, P
positions, D dimension.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.collections.columns import Columns
from mlcd.collections.filters import Filter
from mlcd.collections.generation import Generation
from mlcd.collections.item import FoundItem, Item
from mlcd.indexes.index_kind import num_cells
from mlcd.indexes.scan import empty_neighbors, merge_neighbors, scan
from mlcd.indexes.tuning import rescore
from mlcd.types import Embeddings, Neighbors, cosines, least_product

# vectors that a graph looks at for each unit of effort, about: its degree, less those seen before
_VECTORS_PER_EFFORT: Final = 30
# matching positions up to which a scan is used whatever an index would cost
_SCAN_AT_MOST: Final = 2000
# gathering more vectors for a scan takes longer than looking into all cells, whose codes take a
# quarter of the bytes
_GATHERED_AT_MOST: Final = 20_000


@dataclass(frozen=True)
class SearchAnswer:
    """The answer to a search.

    matches: those of each query, most similar first. exact: every item that matches was compared.
    matching: how many items the filter leaves.
    """

    matches: list[list[FoundItem]]
    exact: bool
    matching: int


@dataclass(frozen=True)
class Searcher:
    """One state of a collection.

    delta: float32 [P - N, D], after the generation's N positions. alive: bool [P]. ids, metadata
    (JSON), rows: by position, P or more. position_of: the position of an id, in this or a later
    state.
    """

    generation: Generation
    delta: Embeddings
    alive: NDArray[np.bool_]
    num_alive: int
    ids: list[str]
    metadata: list[str]
    rows: NDArray[np.int64]
    position_of: dict[str, int]
    columns: Columns

    @property
    def num_indexed(self) -> int:
        return len(self.generation.rows)

    @property
    def num_positions(self) -> int:
        return len(self.alive)

    def find(self, item_id: str) -> int | None:
        """Returns the position of an item, or None where this state has none."""
        position = self.position_of.get(item_id)
        if position is None or position >= self.num_positions or not self.alive[position]:
            return None
        return position

    def vectors(self, positions: NDArray[np.int64]) -> Embeddings:
        """Returns the vectors of the positions, [n, D] float32, in this order."""
        indexed = positions < self.num_indexed
        vectors = np.empty((len(positions), self.delta.shape[1]), dtype=np.float32)
        vectors[indexed] = self.generation.vectors[positions[indexed]]
        vectors[~indexed] = self.delta[positions[~indexed] - self.num_indexed]
        return vectors

    def item(self, position: int) -> Item:
        """Returns the item at a position."""
        vector = self.vectors(np.array([position]))[0]
        return Item(self.ids[position], vector, json.loads(self.metadata[position]))

    def items(self, num_rows: int) -> Iterator[list[Item]]:
        """Yields all items in blocks of so many."""
        positions = np.flatnonzero(self.alive)
        for start in range(0, len(positions), num_rows):
            block = positions[start : start + num_rows]
            yield [
                Item(self.ids[position], vector, json.loads(self.metadata[position]))
                for position, vector in zip(block.tolist(), self.vectors(block), strict=True)
            ]

    def list_rows(self) -> tuple[list[str], Callable[[NDArray[np.int64]], Embeddings]]:
        """Returns (ids, take): take(rows [n]) returns the vectors of these ids, [n, D]."""
        positions = np.flatnonzero(self.alive)
        ids = [self.ids[position] for position in positions.tolist()]
        return ids, lambda rows: self.vectors(positions[rows])

    def search(
        self,
        queries: Embeddings,
        top: int,
        *,
        condition: Filter | None,
        threshold: float | None,
        exact: bool,
    ) -> SearchAnswer:
        """Returns min(top, matching) matches of each unit query ([Q, D]), or those of them that
        reach the threshold.
        """
        allowed, matching = self.alive, self.num_alive
        if condition is not None:
            allowed = condition.matches(self) & self.alive
            matching = int(np.count_nonzero(allowed))
        top = min(top, matching)
        if top == 0 or not len(queries):
            return SearchAnswer([[] for _ in queries], True, matching)
        every = matching == self.num_positions
        neighbors, was_exact = self._search_indexed(
            queries, top, None if every else allowed[: self.num_indexed], exact=exact
        )
        if len(self.delta):
            allowed_rows = None if every else np.flatnonzero(allowed[self.num_indexed :])
            of_delta = scan(queries, self.delta, top, allowed_rows=allowed_rows)
            shifted = np.where(of_delta.ids >= 0, of_delta.ids + self.num_indexed, -1)
            neighbors = merge_neighbors(neighbors, Neighbors(shifted, of_delta.scores), top)
        return SearchAnswer(self._matches(neighbors, threshold), was_exact, matching)

    def nearest_indexed(
        self, queries: Embeddings, top: int, allowed: NDArray[np.bool_]
    ) -> Neighbors:
        """Returns the `top` nearest of the generation's positions that are allowed, [Q, top]."""
        return self._search_indexed(queries, top, allowed, exact=False)[0]

    def _search_indexed(
        self, queries: Embeddings, top: int, allowed: NDArray[np.bool_] | None, *, exact: bool
    ) -> tuple[Neighbors, bool]:
        """Searches the generation's positions, and tells whether all of them were compared."""
        tuned, num = self.generation.tuned, self.num_indexed
        allowed_num = num if allowed is None else int(np.count_nonzero(allowed))
        if allowed_num == num:
            allowed = None
        num_answers = min(top, allowed_num)
        if num_answers == 0:
            return empty_neighbors(len(queries), top), True
        effort = self._effort(num_answers, allowed_num)
        if exact or tuned.index is None or effort is None:
            allowed_rows = None if allowed is None else np.flatnonzero(allowed)
            return scan(queries, self.generation.vectors, top, allowed_rows=allowed_rows), True
        candidates = min(top * tuned.widening, num)
        neighbors = tuned.index.search(queries, candidates, allowed=allowed, effort=effort)
        if tuned.widening > 1:
            neighbors = rescore(queries, self.generation.vectors, neighbors, top)
        short = np.flatnonzero((neighbors.ids >= 0).sum(axis=1) < num_answers)
        if len(short):
            allowed_rows = None if allowed is None else np.flatnonzero(allowed)
            scanned = scan(queries[short], self.generation.vectors, top, allowed_rows=allowed_rows)
            ids, scores = _pad(neighbors, top)
            ids[short], scores[short] = scanned.ids, scanned.scores
            neighbors = Neighbors(ids, scores)
        return neighbors, False

    def _effort(self, num_answers: int, allowed_num: int) -> int | None:
        """Returns how far the index has to look; None where comparing all allowed items is less
        work.

        The fewer are allowed, the further away the nearest of them are: in proportion, where they
        are spread like the rest.
        """
        tuned, num = self.generation.tuned, self.num_indexed
        if tuned.index is None or tuned.effort is None or allowed_num <= _SCAN_AT_MOST:
            return None
        effort = max(tuned.effort, num_answers * tuned.widening if tuned.kind == "hnsw" else 0)
        scaled = int(np.ceil(effort * num / allowed_num))
        if tuned.kind == "hnsw":  # a graph is walked over all rows, allowed or not
            return None if _VECTORS_PER_EFFORT * scaled > allowed_num else scaled
        cells = num_cells(num)  # in cells, rows that are not allowed cost next to nothing
        return None if scaled > cells and allowed_num <= _GATHERED_AT_MOST else min(scaled, cells)

    def _matches(self, neighbors: Neighbors, threshold: float | None) -> list[list[FoundItem]]:
        least = -np.inf if threshold is None else least_product(threshold)
        similarities = cosines(neighbors.scores).tolist()
        return [
            [
                FoundItem(self.ids[position], similarity, self.metadata[position])
                for position, similarity in zip(positions, row, strict=True)
                if position >= 0 and similarity >= least
            ]
            for positions, row in zip(neighbors.ids.tolist(), similarities, strict=True)
        ]


def _pad(neighbors: Neighbors, top: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Returns copies padded to [Q, top]."""
    empty = empty_neighbors(len(neighbors.ids), top)
    padded = merge_neighbors(neighbors, empty, top)
    return padded.ids.astype(np.int64), padded.scores.astype(np.float32)
