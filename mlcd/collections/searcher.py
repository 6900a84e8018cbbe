"""An immutable state of a collection, which readers use without locks; writers replace it.

Items have positions: first the N positions of the index, then the delta, which is scanned. The
position of a deleted or replaced item is dead. Writers only append to the arrays, beyond the
positions of this state, so a reader never waits for a writer and never sees a partial change.
Shapes: Q queries, P positions, D dimension.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlcd.collections.columns import Columns
from mlcd.collections.filters import Filter
from mlcd.collections.generation import Generation
from mlcd.collections.item import FoundItem, Item
from mlcd.indexes.index_kind import num_cells
from mlcd.indexes.scan import empty_neighbors, merge_neighbors, scan
from mlcd.indexes.tuning import rescore
from mlcd.types import Embeddings, Neighbors, cosines, min_dot_product

# Vectors that a graph compares per unit of effort: about its degree, less vectors already visited.
_VECTORS_PER_EFFORT: Final = 30
# Up to this many matching positions, a search always scans.
_SCAN_AT_MOST: Final = 2000
# Gathering more vectors than this for a scan takes longer than searching all cells, whose codes
# take a quarter of the bytes.
_GATHERED_AT_MOST: Final = 20_000

Device = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class SearchAnswer:
    """The results of a search.

    matches: matches of each query, most similar first. exact: whether all items that pass the
    filter were compared. matching: number of items that pass the filter. by: what compared them;
    `cpu` includes databases.
    """

    matches: list[list[FoundItem]]
    exact: bool
    matching: int
    by: Device = "cpu"


@dataclass(frozen=True)
class Searcher:
    """One state of a collection.

    delta: float32 [P - N, D], vectors of the positions after the generation's N. alive: bool [P].
    ids, metadata (JSON), rows: by position, at least P entries. position_of: position of each id,
    possibly of a later state.
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
        """Returns the position of an item; None if this state does not have the item."""
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
        """Yields all items in blocks of `num_rows`."""
        positions = np.flatnonzero(self.alive)
        for start in range(0, len(positions), num_rows):
            block = positions[start : start + num_rows]
            yield [
                Item(self.ids[position], vector, json.loads(self.metadata[position]))
                for position, vector in zip(block.tolist(), self.vectors(block), strict=True)
            ]

    def list_rows(self) -> tuple[list[str], Callable[[NDArray[np.int64]], Embeddings]]:
        """Returns (ids, take): take(indices [n]) returns the vectors of the ids at these indices,
        [n, D].
        """
        positions = np.flatnonzero(self.alive)
        ids = [self.ids[position] for position in positions.tolist()]
        return ids, lambda indices: self.vectors(positions[indices])

    def search(
        self,
        queries: Embeddings,
        top: int,
        *,
        condition: Filter | None,
        threshold: float | None,
        exact: bool,
    ) -> SearchAnswer:
        """Returns the best min(top, matching) items for each unit query ([Q, D]), without items
        below the threshold.
        """
        allowed, matching = self.alive, self.num_alive
        if condition is not None:
            allowed = condition.matches(self) & self.alive
            matching = int(np.count_nonzero(allowed))
        top = min(top, matching)
        if top == 0 or not len(queries):
            return SearchAnswer([[] for _ in queries], True, matching)
        all_match = matching == self.num_positions
        mask = None if all_match else allowed
        on_gpu = self._search_gpu(queries, top, self.delta, mask, exact=exact)
        if on_gpu is not None:
            neighbors, was_exact = on_gpu
            return SearchAnswer(self._matches(neighbors, threshold), was_exact, matching, "gpu")
        neighbors, was_exact = self._search_indexed(
            queries, top, None if all_match else allowed[: self.num_indexed], exact=exact
        )
        if len(self.delta):
            allowed_rows = None if all_match else np.flatnonzero(allowed[self.num_indexed :])
            unindexed = scan(queries, self.delta, top, allowed_rows=allowed_rows)
            positions = np.where(unindexed.ids >= 0, unindexed.ids + self.num_indexed, -1)
            neighbors = merge_neighbors(neighbors, Neighbors(positions, unindexed.scores), top)
        index = None if was_exact else self.generation.tuned.index
        by: Device = "gpu" if index is not None and index.on_gpu else "cpu"
        return SearchAnswer(self._matches(neighbors, threshold), was_exact, matching, by)

    def nearest_indexed(
        self, queries: Embeddings, top: int, allowed: NDArray[np.bool_]
    ) -> Neighbors:
        """Returns the `top` nearest of the generation's positions that are allowed, [Q, top]."""
        on_gpu = self._search_gpu(queries, top, self.delta[:0], allowed, exact=False)
        if on_gpu is not None:
            return on_gpu[0]
        return self._search_indexed(queries, top, allowed, exact=False)[0]

    def _search_gpu(
        self,
        queries: Embeddings,
        top: int,
        delta: Embeddings,
        allowed: NDArray[np.bool_] | None,
        *,
        exact: bool,
    ) -> tuple[Neighbors, bool] | None:
        """Returns the neighbors, and whether all allowed vectors were compared; None if the CPU has
        to search.
        """
        gpu, recall = self.generation.gpu, self.generation.tuned.recall
        given = queries, top, self.generation.vectors, delta, allowed
        if not exact and recall is not None:
            near = gpu.search_graph(*given, target=recall.target)
            if near is not None:
                return near, False
        nearest = gpu.scan(*given)
        return None if nearest is None else (nearest, True)

    def _search_indexed(
        self, queries: Embeddings, top: int, allowed: NDArray[np.bool_] | None, *, exact: bool
    ) -> tuple[Neighbors, bool]:
        """Returns the neighbors among the generation's positions, and whether all allowed positions
        were compared.
        """
        tuned, num = self.generation.tuned, self.num_indexed
        num_allowed = num if allowed is None else int(np.count_nonzero(allowed))
        if num_allowed == num:
            allowed = None
        num_answers = min(top, num_allowed)
        if num_answers == 0:
            return empty_neighbors(len(queries), top), True
        effort = self._choose_effort(num_answers, num_allowed)
        if exact or tuned.index is None or effort is None:
            allowed_rows = None if allowed is None else np.flatnonzero(allowed)
            return scan(queries, self.generation.vectors, top, allowed_rows=allowed_rows), True
        candidates = min(top * tuned.widening, num)
        neighbors = tuned.index.search(queries, candidates, allowed=allowed, effort=effort)
        if tuned.widening > 1:
            neighbors = rescore(queries, self.generation.vectors, neighbors, top)
        incomplete = np.flatnonzero((neighbors.ids >= 0).sum(axis=1) < num_answers)
        if len(incomplete):
            allowed_rows = None if allowed is None else np.flatnonzero(allowed)
            scanned = scan(
                queries[incomplete], self.generation.vectors, top, allowed_rows=allowed_rows
            )
            ids, scores = _pad(neighbors, top)
            ids[incomplete], scores[incomplete] = scanned.ids, scanned.scores
            neighbors = Neighbors(ids, scores)
        return neighbors, False

    def _choose_effort(self, num_answers: int, num_allowed: int) -> int | None:
        """Returns the effort for a search among the allowed items; None if a scan of them is less
        work.

        With fewer allowed items the nearest one is farther away, in proportion if the allowed items
        are distributed like all items.
        """
        tuned, num = self.generation.tuned, self.num_indexed
        if tuned.index is None or tuned.effort is None or num_allowed <= _SCAN_AT_MOST:
            return None
        effort = max(tuned.effort, num_answers * tuned.widening if tuned.kind == "hnsw" else 0)
        scaled = int(np.ceil(effort * num / num_allowed))
        if tuned.kind == "hnsw":  # a graph search also visits rows that are not allowed
            return None if _VECTORS_PER_EFFORT * scaled > num_allowed else scaled
        cells = num_cells(num)  # in cells, rows that are not allowed cost almost nothing
        return None if scaled > cells and num_allowed <= _GATHERED_AT_MOST else min(scaled, cells)

    def _matches(self, neighbors: Neighbors, threshold: float | None) -> list[list[FoundItem]]:
        least = -np.inf if threshold is None else min_dot_product(threshold)
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
    """Returns copies of ids and scores, padded to [Q, top]."""
    empty = empty_neighbors(len(neighbors.ids), top)
    padded = merge_neighbors(neighbors, empty, top)
    return padded.ids.astype(np.int64), padded.scores.astype(np.float32)
