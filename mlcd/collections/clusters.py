"""The clusters of a collection: the nearest center of every item, computed once and cached.

    clusters/DIGEST.npz   center and similarity by row of the ledger; DIGEST names the centers

Shapes: N items, K centers.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.members import NOVELTY_QUANTILE
from mlcd.collections.by_row import ByRow, read_by_row, write_by_row
from mlcd.collections.searcher import Searcher
from mlcd.types import Embeddings, Neighbors, cosines

CLUSTERS: Final = "clusters"
_ASSIGNED: Final = np.empty(0, np.dtype([("center", "<i4"), ("similarity", "<f4")]))
_SHOWN_DIGITS: Final = 16
MIN_ROWS_FOR_NOVELTY: Final = 20  # fewest items for which the novelty distance is estimated

# nearest(vectors [n, D]) returns the nearest center of each unit row, [n, 1]
Nearest: TypeAlias = Callable[[Embeddings], Neighbors]


@dataclass(frozen=True)
class Clusters:
    """The members of each center among the items of one state of a collection.

    positions: int64 [N], sorted by center, then by similarity descending, then by id.
    similarities: float32 [N], in this order. starts: index of each center's first member, int64
    [K + 1].
    """

    state: Searcher
    positions: NDArray[np.int64]
    similarities: NDArray[np.float32]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, assigned: ByRow, searcher: Searcher, num_centers: int) -> "Clusters":
        positions = np.flatnonzero(searcher.alive)
        values = assigned.at(searcher.rows[positions])
        values["similarity"] = cosines(values["similarity"])
        order = np.lexsort((-values["similarity"], values["center"]))
        positions, values = positions[order], values[order]
        _sort_ties(positions, values, searcher.ids)
        starts = np.searchsorted(values["center"], np.arange(num_centers + 1))
        return cls(searcher, positions, values["similarity"], starts)

    def members(self, center: int) -> slice:
        """Returns the slice of `positions` that holds the center's members."""
        return slice(int(self.starts[center]), int(self.starts[center + 1]))

    def behind(self, center: int, similarity: float, item_id: str) -> int:
        """Returns the index in `positions` of the first member after the given one, which need not
        exist any more.
        """
        part = self.members(center)
        negated = -self.similarities[part]  # ascending, for searchsorted
        negated_similarity = -np.float32(similarity)
        start: int = part.start + int(np.searchsorted(negated, negated_similarity, "left"))
        stop: int = part.start + int(np.searchsorted(negated, negated_similarity, "right"))
        tied_ids = [self.state.ids[position] for position in self.positions[start:stop].tolist()]
        return start + bisect_right(tied_ids, item_id)

    @cached_property
    def num_members(self) -> NDArray[np.int64]:
        """Returns the number of each center's members, [K]."""
        return np.diff(self.starts)

    @cached_property
    def spread(self) -> NDArray[np.float64]:
        """Returns the mean of 1 - cosine over each center's members, [K]; NaN without members."""
        return self._mean(1 - self.similarities.astype(np.float64))

    def novelty(self, farthest: NDArray[np.floating] | float) -> NDArray[np.float64]:
        """Returns the share of each center's members with 1 - cosine above `farthest`, [K]; NaN
        without members.

        farthest: one distance for all centers, or one per center, [K].
        """
        distances = np.broadcast_to(farthest, len(self.num_members))
        beyond = 1 - self.similarities > np.repeat(distances, self.num_members)
        return self._mean(beyond.astype(np.float64))

    @cached_property
    def novelty_distance(self) -> float | None:
        """Returns the 95 % quantile of 1 - cosine between items and their centers; None with fewer
        than `MIN_ROWS_FOR_NOVELTY` items.
        """
        if len(self.similarities) < MIN_ROWS_FOR_NOVELTY:
            return None
        return float(np.quantile(1 - self.similarities, NOVELTY_QUANTILE))

    def centers(self) -> NDArray[np.int32]:
        """Returns the center of each position of the state, -1 for a dead position."""
        center_of = np.full(self.state.num_positions, -1, dtype=np.int32)
        center_ids = np.arange(len(self.num_members), dtype=np.int32)
        center_of[self.positions] = np.repeat(center_ids, self.num_members)
        return center_of

    def _mean(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the mean of each center's values, [K]."""
        sums = np.concatenate([[0.0], np.cumsum(values)])[self.starts]
        with np.errstate(invalid="ignore"):
            means: NDArray[np.float64] = np.diff(sums) / self.num_members
        return means


class Assigner:
    """Caches the assignment of a collection's items to the centers requested last. Not
    thread-safe.
    """

    def __init__(self, folder: Path | None) -> None:
        """folder: folder of the collection, for the cache file; None caches in memory only."""
        self._folder = None if folder is None else folder / CLUSTERS
        self._digest = ""
        self._assigned = self._written = ByRow.empty(_ASSIGNED)

    def clusters(
        self, searcher: Searcher, digest: str, *, num_centers: int, nearest: Nearest
    ) -> Clusters:
        """Returns the clusters of a state; computes only the assignment of new items."""
        if digest != self._digest:
            self._assigned = self._written = self._read(digest)
            self._digest = digest

        def assign(vectors: Embeddings) -> NDArray[Any]:
            neighbors = nearest(vectors)
            values = np.empty(len(vectors), dtype=_ASSIGNED.dtype)
            values["center"], values["similarity"] = neighbors.ids[:, 0], neighbors.scores[:, 0]
            return values

        self._assigned = self._assigned.extend(searcher, assign)
        return Clusters.of(self._assigned, searcher, num_centers)

    @property
    def is_worth_writing(self) -> bool:
        """Returns whether the file lacks more than a tenth of the assignment."""
        return 10 * self._written.num_missing(self._assigned.rows) > len(self._assigned.rows)

    def write(self) -> None:
        """Writes the assignment, and removes the files for other centers."""
        assert self._folder is not None
        path = self._folder / _name_file(self._digest)
        write_by_row(path, self._assigned)
        self._written = self._assigned
        for other_path in path.parent.glob("*.npz"):
            if other_path != path:
                other_path.unlink(missing_ok=True)

    def _read(self, digest: str) -> ByRow:
        if self._folder is None:
            return ByRow.empty(_ASSIGNED)
        return read_by_row(self._folder / _name_file(digest), _ASSIGNED)


def _name_file(digest: str) -> str:
    return f"{digest[:_SHOWN_DIGITS]}.npz"


def _sort_ties(positions: NDArray[np.int64], values: NDArray[np.void], ids: list[str]) -> None:
    """Sorts runs of equal center and similarity by id, in place; such runs are rare."""
    is_tied = values[1:] == values[:-1]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_tied, [False]]).astype(np.int8)))
    for first, last in edges.reshape(-1, 2):
        run = positions[first : last + 1]
        run[:] = sorted(run.tolist(), key=ids.__getitem__)
