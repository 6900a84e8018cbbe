"""The heavy passes of a curation, over all images, pairs or rows: each is a map of a pure function.

This process maps them over its own blocks (`OwnPasses`); a cluster has an adapter of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Artifact
from mlcd.clustering.cells import Take
from mlcd.clustering.close_pairs import PairSearch
from mlcd.clustering.nearest import CenterScan
from mlcd.collections.duplicates import FindLinks
from mlcd.cores import available_cores
from mlcd.images.entries import Entries
from mlcd.images.source import Source
from mlcd.parts.image_scores import scores_of
from mlcd.progress import Meter
from mlcd.types import Embeddings, unit_rows

# ids of the nearest centers, int32 [n], and the distances to them, float32 [n]
NearestOf = tuple[NDArray[np.int32], NDArray[np.float32]]


@dataclass(frozen=True)
class TwoSets:
    """The rows of embeddings, and after them those of another set."""

    own: EmbeddingsArtifact
    others: EmbeddingsArtifact

    @property
    def num_rows(self) -> int:
        return self.own.num_rows + self.others.num_rows

    def take(self, rows: NDArray[np.int64]) -> Embeddings:
        """Returns unit rows by their numbers."""
        found = np.empty((len(rows), self.own.dimension), np.float32)
        own = rows < self.own.num_rows
        found[own] = self.own.unit_rows_at(rows[own])
        found[~own] = self.others.unit_rows_at(rows[~own] - self.own.num_rows)
        return found


class CuratePasses(Protocol):
    """The passes, wherever they run: every adapter yields the same."""

    def scores(
        self,
        embeddings: EmbeddingsArtifact,
        images: tuple[Source, Entries],
        parts: Sequence[slice],
        meter: Meter,
    ) -> Iterator[NDArray[np.float64]]:
        """Yields the pixel scores of each part of the images, and advances the meter by them."""
        ...

    def link_finder(self, embeddings: EmbeddingsArtifact, similarity: float) -> FindLinks | None:
        """Returns what searches the pairs of distinct rows in place of this process; None for this
        process.
        """
        ...

    def leaks(self, sets: TwoSets, similarity: float, meter: Meter) -> Iterator[NDArray[np.int64]]:
        """Yields rows of the first set that are close to one of the second; advances the meter by
        the rows of both.
        """
        ...

    def nearest(
        self, embeddings: EmbeddingsArtifact, artifact: Artifact, centers: Centers
    ) -> Iterator[NearestOf]:
        """Yields the nearest center of each row, block by block, in order."""
        ...


class OwnPasses:
    """The `CuratePasses` protocol in this process."""

    def scores(
        self,
        embeddings: EmbeddingsArtifact,
        images: tuple[Source, Entries],
        parts: Sequence[slice],
        meter: Meter,
    ) -> Iterator[NDArray[np.float64]]:
        del embeddings
        source, entries = images
        cores = available_cores()
        for part in parts:
            yield scores_of(source, entries[part], num_threads=cores, on_done=meter.advance)

    def link_finder(self, embeddings: EmbeddingsArtifact, similarity: float) -> None:
        del embeddings, similarity

    def leaks(self, sets: TwoSets, similarity: float, meter: Meter) -> Iterator[NDArray[np.int64]]:
        search = search_leaks(sets.num_rows, sets.own.num_rows, sets.take, similarity, meter)
        for cell in range(search.cells.num_cells):
            yield leaking(search, range(cell, cell + 1))
            meter.advance(len(search.cells.members(cell)))

    def nearest(
        self, embeddings: EmbeddingsArtifact, artifact: Artifact, centers: Centers
    ) -> Iterator[NearestOf]:
        del artifact
        scan = CenterScan(centers.vectors, matmul="numpy")
        return (nearest_of(block, centers, scan) for _, block in embeddings.blocks())


def search_leaks(
    num_rows: int, num_own: int, take: Take, similarity: float, meter: Meter
) -> PairSearch:
    """Returns the search for pairs of a row of the first set and one of the second."""
    return PairSearch(num_rows, take, similarity, num_own=num_own, tick=partial(meter.advance, 0))


def leaking(search: PairSearch, cells: range) -> NDArray[np.int64]:
    """Returns the rows of the first set in the pairs of these cells, ascending."""
    found = [np.empty(0, np.int64)]
    for cell in cells:
        found += [np.unique(pairs.first) for pairs in search.of_cell(cell)]
    return np.unique(np.concatenate(found))


def nearest_of(block: Embeddings, centers: Centers, scan: CenterScan) -> NearestOf:
    """Returns the nearest center of each row of a block, and the distance to it."""
    found = scan.nearest(centers.align(unit_rows(block)), 1)
    return found.ids[:, 0].astype(np.int32, copy=False), 1 - found.scores[:, 0]
