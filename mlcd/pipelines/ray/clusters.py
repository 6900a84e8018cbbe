"""Clusters on a Ray cluster: each pass of k-means maps blocks of rows, and adds sums in a tree.

Where a worker does not hold all centers, each call has a block of rows and a block of centers, and
the nearest of each block are compared by their exact scores.

The calls are stateless, so Ray repeats those of a lost node. Sums are of whole numbers, so the
centers have the same bits as from one process.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.copies import fetch_copy
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Artifact
from mlcd.clustering.kmeans import (
    assign,
    assign_in_block,
    nearest_of_blocks,
    sum_in_block,
)
from mlcd.clustering.rows import SelectedRows, UnitRows
from mlcd.clustering.sums import ClusterSums
from mlcd.locations import location_of
from mlcd.pipelines.cluster import ClusterOptions, KeyedRows, cluster
from mlcd.pipelines.ray.calls import RayCalls
from mlcd.pipelines.ray.session import RayOptions, centers_at_once, ray_session
from mlcd.progress import Reporter
from mlcd.types import Embeddings

_LEAST_ROWS, _MOST_ROWS = 8192, 1 << 20  # of a block
_BLOCKS_EACH: Final = 2  # blocks for each worker
# of a number of a center: itself, its sum, and what the scan makes of it
_NUMBER_BYTES: Final = 16

# The rows of one call: the location of the embeddings, the numbers of the rows, and the mean.
_Block = tuple[str, NDArray[np.int64], NDArray[np.float32] | None]


def cluster_on_ray(
    embeddings: EmbeddingsArtifact,
    out: Path,
    options: ClusterOptions,
    ray_options: RayOptions,
    reporter: Reporter,
    *,
    announce: Callable[[str], None] = lambda _: None,
) -> Artifact:
    """Does what `mlcd.pipelines.cluster.cluster` does, with the passes of k-means on Ray."""
    with ExitStack() as session:

        def find(
            numbers: NDArray[np.int64] | None, mean: NDArray[np.float32] | None
        ) -> _MembersOnRay:
            ray = session.enter_context(ray_session(ray_options.address))
            calls = RayCalls(ray, ray_options, announce)
            return _MembersOnRay(calls, embeddings, numbers, mean)

        return cluster(embeddings, out, options, reporter=reporter, find_members=find)


class _MembersOnRay:
    """The `MemberSums` protocol by calls on the connected cluster."""

    def __init__(
        self,
        calls: RayCalls,
        embeddings: EmbeddingsArtifact,
        numbers: NDArray[np.int64] | None,
        mean: NDArray[np.float32] | None,
    ) -> None:
        """numbers: those of the rows to cluster; None for all. mean: subtracted; None for none."""
        self._calls = calls
        numbers = np.arange(embeddings.num_rows) if numbers is None else numbers
        self.assignment = np.full(len(numbers), -1, np.int32)
        self._totals: ClusterSums | None = None
        place = location_of(embeddings.artifact.path)
        size = _block_rows(len(numbers), calls.num_workers)
        self._slices = [slice(start, start + size) for start in range(0, len(numbers), size)]
        self._blocks = [calls.share((place, numbers[own], mean)) for own in self._slices]

    def assign(self, centers: Embeddings) -> int:
        num, dimension = centers.shape
        at_once = centers_at_once(num, _NUMBER_BYTES * dimension, self._calls.memory_bytes)
        if at_once < num:
            parts = [range(start, min(start + at_once, num)) for start in range(0, num, at_once)]
            ids, sums = self._in_parts(centers, parts)
        else:
            ids, sums = self._at_once(centers)
        moved = 0
        for own, call in zip(self._slices, ids, strict=True):
            block_ids = self._calls.result(call)
            moved += int((block_ids != self.assignment[own]).sum())
            self.assignment[own] = block_ids
        self._totals = _join([self._calls.result(reference) for reference in sums])
        return moved

    def totals(self) -> ClusterSums:
        assert self._totals is not None
        return self._totals

    def _at_once(self, centers: Embeddings) -> tuple[list[Any], list[Any]]:
        """Returns the ids of each block of rows, and the sums of all, as references."""
        to_all, is_first = self._calls.share(centers), self._totals is None
        pairs = [
            self._calls.call(
                _assign, block, to_all, None if is_first else self.assignment[own], num_returns=2
            )
            for own, block in zip(self._slices, self._blocks, strict=True)
        ]
        sums = self._calls.in_a_tree(_add, [sums for _, sums in pairs])
        return [ids for ids, _ in pairs], [sums]

    def _in_parts(self, centers: Embeddings, parts: list[range]) -> tuple[list[Any], list[Any]]:
        """Returns the ids of each block of rows, and the sums of each part of the centers."""
        calls = self._calls
        shared = [calls.share(centers[part.start : part.stop]) for part in parts]
        ids = []
        for block in self._blocks:
            candidates = [
                calls.call(_assign_in_part, block, shared_part, part.start)
                for part, shared_part in zip(parts, shared, strict=True)
            ]
            ids.append(calls.reduce(nearest_of_blocks, *candidates))
        sums = [
            calls.in_a_tree(
                _add,
                [
                    calls.call(_sum, block, own, part)
                    for block, own in zip(self._blocks, ids, strict=True)
                ],
            )
            for part in parts
        ]
        return ids, sums


def _block_rows(num_rows: int, num_workers: int) -> int:
    return int(np.clip(-(-num_rows // (_BLOCKS_EACH * num_workers)), _LEAST_ROWS, _MOST_ROWS))


def _assign(
    block: _Block, centers: Embeddings, previous: NDArray[np.int32] | None
) -> tuple[NDArray[np.int32], ClusterSums]:
    return assign(_rows_of(block), centers, previous)


def _assign_in_part(
    block: _Block, centers: Embeddings, first: int
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    return assign_in_block(_rows_of(block), centers, first)


def _sum(block: _Block, assignment: NDArray[np.int32], centers: range) -> ClusterSums:
    return sum_in_block(_rows_of(block), assignment, centers)


def _rows_of(block: _Block) -> UnitRows:
    place, numbers, mean = block
    return UnitRows(SelectedRows(_rows_at(place), numbers), mean)


@lru_cache(maxsize=1)
def _rows_at(place: str) -> KeyedRows:
    """Opens the rows once for all calls in this process."""
    return KeyedRows(EmbeddingsArtifact.open(fetch_copy(place)))


def _add(first: ClusterSums, second: ClusterSums) -> ClusterSums:
    return ClusterSums(first.sums + second.sums, first.sizes + second.sizes).check()


def _join(parts: list[ClusterSums]) -> ClusterSums:
    """Returns the sums of all centers; parts: those of blocks of them, in order."""
    if len(parts) == 1:
        return parts[0]
    return ClusterSums(
        np.concatenate([part.sums for part in parts]),
        np.concatenate([part.sizes for part in parts]),
    )
