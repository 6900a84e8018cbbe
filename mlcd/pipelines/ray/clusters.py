"""K-means on a Ray cluster: each pass assigns blocks of rows in parallel and adds their sums in a
tree.

If the centers exceed the memory of a worker, each call compares a block of rows with a block of
centers, and the nearest centers of all blocks are compared by their exact scores.

The calls are stateless, so Ray can repeat the calls of a lost node. Sums are of integers, so the
centers have the same bits as from a single process.
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

_MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS = 8192, 1 << 20
_BLOCKS_PER_WORKER: Final = 2
# memory per component of a center: its value, its sum, and the copies of the scan
_COMPONENT_BYTES: Final = 16

# The rows of one call: the location of the embeddings, the ids of the rows, and the mean.
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
    """Runs `mlcd.pipelines.cluster.cluster`, with the passes of k-means on Ray."""
    with ExitStack() as session:

        def find_members(
            row_ids: NDArray[np.int64] | None, mean: NDArray[np.float32] | None
        ) -> _MembersOnRay:
            ray = session.enter_context(ray_session(ray_options.address))
            calls = RayCalls(ray, ray_options, announce)
            return _MembersOnRay(calls, embeddings, row_ids, mean)

        return cluster(embeddings, out, options, reporter=reporter, find_members=find_members)


class _MembersOnRay:
    """The `MemberSums` protocol with calls on the connected Ray cluster."""

    def __init__(
        self,
        calls: RayCalls,
        embeddings: EmbeddingsArtifact,
        row_ids: NDArray[np.int64] | None,
        mean: NDArray[np.float32] | None,
    ) -> None:
        """row_ids: ids of the rows to cluster; None for all. mean: to subtract; None for none."""
        self._calls = calls
        row_ids = np.arange(embeddings.num_rows) if row_ids is None else row_ids
        self.assignment = np.full(len(row_ids), -1, np.int32)
        self._totals: ClusterSums | None = None
        location = location_of(embeddings.artifact.path)
        size = _choose_block_rows(len(row_ids), calls.num_workers)
        self._slices = [slice(start, start + size) for start in range(0, len(row_ids), size)]
        self._blocks = [
            calls.share((location, row_ids[block_slice], mean)) for block_slice in self._slices
        ]

    def assign(self, centers: Embeddings) -> int:
        num, dimension = centers.shape
        at_once = centers_at_once(num, _COMPONENT_BYTES * dimension, self._calls.memory_bytes)
        if at_once < num:
            parts = [range(start, min(start + at_once, num)) for start in range(0, num, at_once)]
            ids, sums = self._assign_in_parts(centers, parts)
        else:
            ids, sums = self._assign_at_once(centers)
        moved = 0
        for block_slice, call in zip(self._slices, ids, strict=True):
            block_ids = self._calls.result(call)
            moved += int((block_ids != self.assignment[block_slice]).sum())
            self.assignment[block_slice] = block_ids
        self._totals = _join([self._calls.result(reference) for reference in sums])
        return moved

    def totals(self) -> ClusterSums:
        assert self._totals is not None
        return self._totals

    def _assign_at_once(self, centers: Embeddings) -> tuple[list[Any], list[Any]]:
        """Returns references to the center ids of each block of rows, and to the sums of all."""
        shared_centers, is_first = self._calls.share(centers), self._totals is None
        pairs = [
            self._calls.call(
                _assign,
                block,
                shared_centers,
                None if is_first else self.assignment[block_slice],
                num_returns=2,
            )
            for block_slice, block in zip(self._slices, self._blocks, strict=True)
        ]
        sums = self._calls.in_a_tree(_add, [sums for _, sums in pairs])
        return [ids for ids, _ in pairs], [sums]

    def _assign_in_parts(
        self, centers: Embeddings, parts: list[range]
    ) -> tuple[list[Any], list[Any]]:
        """Returns references to the center ids per block of rows, and to the sums of each part."""
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
                    calls.call(_sum, block, block_ids, part)
                    for block, block_ids in zip(self._blocks, ids, strict=True)
                ],
            )
            for part in parts
        ]
        return ids, sums


def _choose_block_rows(num_rows: int, num_workers: int) -> int:
    return int(
        np.clip(
            -(-num_rows // (_BLOCKS_PER_WORKER * num_workers)), _MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS
        )
    )


def _assign(
    block: _Block, centers: Embeddings, previous: NDArray[np.int32] | None
) -> tuple[NDArray[np.int32], ClusterSums]:
    return assign(_open_block(block), centers, previous)


def _assign_in_part(
    block: _Block, centers: Embeddings, first: int
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    return assign_in_block(_open_block(block), centers, first)


def _sum(block: _Block, assignment: NDArray[np.int32], centers: range) -> ClusterSums:
    return sum_in_block(_open_block(block), assignment, centers)


def _open_block(block: _Block) -> UnitRows:
    location, row_ids, mean = block
    return UnitRows(SelectedRows(_open_rows(location), row_ids), mean)


@lru_cache(maxsize=1)
def _open_rows(location: str) -> KeyedRows:
    """Opens the rows once for all calls in this process."""
    return KeyedRows(EmbeddingsArtifact.open(fetch_copy(location)))


def _add(first: ClusterSums, second: ClusterSums) -> ClusterSums:
    return ClusterSums(first.sums + second.sums, first.sizes + second.sizes).check()


def _join(parts: list[ClusterSums]) -> ClusterSums:
    """Returns the sums of all centers from the sums of consecutive blocks of centers."""
    if len(parts) == 1:
        return parts[0]
    return ClusterSums(
        np.concatenate([part.sums for part in parts]),
        np.concatenate([part.sizes for part in parts]),
    )
