"""Curation on a Ray cluster: its heavy passes are calls over blocks of images, cells and rows.

The driver decides, and notes in the output what is found, as alone: the same command goes on with
these notes, on the cluster or without it.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.copies import brought
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Artifact
from mlcd.clustering.cells import PivotCells
from mlcd.clustering.close_pairs import PairSearch
from mlcd.clustering.nearest import CenterScan
from mlcd.collections.duplicates import FindLinks, Links, links_of
from mlcd.images.entries import Entries
from mlcd.images.quiet import silence_decoders
from mlcd.images.source import Source
from mlcd.locations import location_of
from mlcd.parts.curate_passes import (
    CuratePasses,
    NearestOf,
    TwoSets,
    leaking,
    nearest_of,
    search_leaks,
)
from mlcd.parts.embedded_images import open_embedded_images
from mlcd.parts.image_scores import scores_of
from mlcd.parts.ray_calls import RayCalls
from mlcd.parts.ray_session import RayOptions, ray_session
from mlcd.progress import Meter
from mlcd.types import Embeddings

_BLOCK_ROWS = 65_536
_CALLS_EACH = 16  # of a pass over cells, for each worker: some cells take far longer than others


@contextmanager
def passes_on_ray(
    options: RayOptions, announce: Callable[[str], None] = lambda _: None
) -> Iterator[CuratePasses]:
    """Yields the passes on the cluster, which is connected to at the first of them."""
    with ExitStack() as session:

        def connect() -> RayCalls:
            ray = session.enter_context(ray_session(options.address))
            return RayCalls(ray, options, announce)

        yield _PassesOnRay(connect)


class _PassesOnRay:
    """The `CuratePasses` protocol by calls on the cluster."""

    def __init__(self, connect: Callable[[], RayCalls]) -> None:
        self._connect = lru_cache(maxsize=1)(connect)

    def scores(
        self,
        embeddings: EmbeddingsArtifact,
        images: tuple[Source, Entries],
        parts: Sequence[slice],
        meter: Meter,
    ) -> Iterator[NDArray[np.float64]]:
        del images  # every node opens them itself
        if not parts:
            return
        calls, place = self._connect(), location_of(embeddings.artifact.path)
        for scores in calls.mapped(_scores, parts, place, calls.num_threads):
            meter.advance(len(scores))
            yield scores

    def link_finder(self, embeddings: EmbeddingsArtifact, similarity: float) -> FindLinks:
        place = location_of(embeddings.artifact.path)

        def find(
            distinct: NDArray[np.int64], search: PairSearch, first: int
        ) -> Iterator[tuple[int, Links]]:
            calls = self._connect()
            task = calls.share(_Search(similarity, search.cells, place, rows=distinct))
            blocks = _blocks_of(search.cells, first, calls)
            for block, links in zip(blocks, calls.mapped(_links, blocks, task), strict=True):
                yield block.stop, links

        return find

    def leaks(self, sets: TwoSets, similarity: float, meter: Meter) -> Iterator[NDArray[np.int64]]:
        search = search_leaks(sets.num_rows, sets.own.num_rows, sets.take, similarity, meter)
        places = [location_of(each.artifact.path) for each in (sets.own, sets.others)]
        calls, cells = self._connect(), search.cells
        task = calls.share(_Search(similarity, cells, places[0], against=places[1]))
        blocks = _blocks_of(cells, 0, calls)
        for block, rows in zip(blocks, calls.mapped(_leaks, blocks, task), strict=True):
            meter.advance(int(cells.starts[block.stop] - cells.starts[block.start]))
            yield rows

    def nearest(
        self, embeddings: EmbeddingsArtifact, artifact: Artifact, centers: Centers
    ) -> Iterator[NearestOf]:
        del centers  # every node reads them itself
        calls = self._connect()
        blocks = [
            range(start, min(start + _BLOCK_ROWS, embeddings.num_rows))
            for start in range(0, embeddings.num_rows, _BLOCK_ROWS)
        ]
        places = location_of(embeddings.artifact.path), location_of(artifact.path)
        return calls.mapped(_nearest, blocks, *places)


def _blocks_of(cells: PivotCells, first: int, calls: RayCalls) -> list[range]:
    """Returns the cells from `first` on, block by block."""
    size = max(1, cells.num_cells // (_CALLS_EACH * calls.num_workers))
    return [
        range(start, min(start + size, cells.num_cells))
        for start in range(first, cells.num_cells, size)
    ]


@dataclass(frozen=True)
class _Search:
    """A search of pairs as every node opens it: the cells are those of the driver.

    rows: the numbers of the rows that are searched; None for all. against: the place of the other
    set. name: tells searches apart in a process that keeps the last one open.
    """

    similarity: float = field(compare=False)
    cells: PivotCells = field(compare=False)
    place: str = field(compare=False)
    rows: NDArray[np.int64] | None = field(default=None, compare=False)
    against: str | None = field(default=None, compare=False)
    name: str = field(default_factory=partial(secrets.token_hex, 8))

    def opened(self) -> PairSearch:
        own, num = _embeddings_at(self.place), len(self.cells.of_row)
        if self.against is not None:
            sets = TwoSets(own, _embeddings_at(self.against))
            cells, num_own = self.cells, own.num_rows
            return PairSearch(num, sets.take, self.similarity, num_own=num_own, cells=cells)
        rows = np.arange(num) if self.rows is None else self.rows

        def take(some: NDArray[np.int64]) -> Embeddings:
            return own.unit_rows_at(rows[some])

        return PairSearch(num, take, self.similarity, cells=self.cells)


def _scores(part: slice, place: str, num_threads: int) -> NDArray[np.float64]:
    silence_decoders()
    source, entries = _images_of(place)
    return scores_of(source, entries[part], num_threads=num_threads, on_done=lambda: None)


def _links(cells: range, search: _Search) -> Links:
    return links_of(_opened(search), cells)


def _leaks(cells: range, search: _Search) -> NDArray[np.int64]:
    return leaking(_opened(search), cells)


def _nearest(rows: range, place: str, centers_place: str) -> NearestOf:
    centers, scan = _scan_of(centers_place)
    block = _embeddings_at(place).rows_at(np.arange(rows.start, rows.stop))
    return nearest_of(block, centers, scan)


# What a process opens stays open for its next calls.


@lru_cache(maxsize=1)
def _opened(search: _Search) -> PairSearch:
    return search.opened()


@lru_cache(maxsize=2)
def _embeddings_at(place: str) -> EmbeddingsArtifact:
    return EmbeddingsArtifact.open(brought(place))


@lru_cache(maxsize=1)
def _images_of(place: str) -> tuple[Source, Entries]:
    return open_embedded_images(_embeddings_at(place))


@lru_cache(maxsize=1)
def _scan_of(place: str) -> tuple[Centers, CenterScan]:
    centers = Centers.open(brought(place))
    return centers, CenterScan(centers.vectors, matmul="numpy")
