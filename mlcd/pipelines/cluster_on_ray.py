"""Clustering on a Ray cluster: each pass of k-means maps blocks of rows, and adds sums in a tree.

The calls hold no state, and Ray makes those of a lost node again. Sums are sums of whole numbers:
the centers have the bits of one process.
"""

from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.copies import brought
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Artifact
from mlcd.clustering.kmeans import assigned
from mlcd.clustering.rows import SelectedRows, UnitRows
from mlcd.clustering.sums import ClusterSums
from mlcd.errors import Unavailable
from mlcd.locations import location_of
from mlcd.parts.ray_session import RayOptions, raise_cause, ray_session
from mlcd.pipelines.cluster import ClusterOptions, KeyedRows, cluster
from mlcd.progress import Reporter
from mlcd.types import Embeddings

_LEAST_ROWS, _MOST_ROWS = 8192, 1 << 20  # of a block
_BLOCKS_EACH: Final = 2  # blocks for each worker
_TRIES: Final = 10  # of a call, where nodes are lost

# The rows of one call: the location of the embeddings, the numbers of the rows, and the mean.
_Block = tuple[str, NDArray[np.int64], NDArray[np.float32] | None]


def cluster_on_ray(
    embeddings: EmbeddingsArtifact,
    out: Path,
    options: ClusterOptions,
    ray_options: RayOptions,
    reporter: Reporter,
) -> Artifact:
    """Does what `mlcd.pipelines.cluster.cluster` does, with the passes of k-means on Ray."""
    with ExitStack() as session:

        def find(
            numbers: NDArray[np.int64] | None, mean: NDArray[np.float32] | None
        ) -> _MembersOnRay:
            ray = session.enter_context(ray_session(ray_options.address))
            return _MembersOnRay(ray, ray_options, embeddings, numbers, mean)

        return cluster(embeddings, out, options, reporter=reporter, find_members=find)


class _MembersOnRay:
    """The `MemberSums` protocol by calls on the connected cluster."""

    def __init__(
        self,
        ray: Any,
        options: RayOptions,
        embeddings: EmbeddingsArtifact,
        numbers: NDArray[np.int64] | None,
        mean: NDArray[np.float32] | None,
    ) -> None:
        """numbers: those of the rows to cluster; None for all. mean: subtracted; None for none."""
        self._ray = ray
        numbers = np.arange(embeddings.num_rows) if numbers is None else numbers
        self.assignment = np.full(len(numbers), -1, np.int32)
        self._totals: ClusterSums | None = None
        place = location_of(embeddings.artifact.path)
        size = _block_rows(len(numbers), options.num_workers(ray.cluster_resources()))
        self._slices = [slice(start, start + size) for start in range(0, len(numbers), size)]
        self._blocks = [ray.put((place, numbers[own], mean)) for own in self._slices]
        self._find = ray.remote(**options.demand, max_retries=_TRIES, num_returns=2)(_assigned)
        self._add = ray.remote(num_cpus=0, max_retries=_TRIES)(_added)

    def assign(self, centers: Embeddings) -> int:
        to_all, is_first = self._ray.put(centers), self._totals is None
        calls = [
            self._find.remote(block, to_all, None if is_first else self.assignment[own])
            for own, block in zip(self._slices, self._blocks, strict=True)
        ]
        sums = self._in_a_tree([sums for _, sums in calls])
        moved = 0
        for own, (ids, _) in zip(self._slices, calls, strict=True):
            found = self._result(ids)
            moved += int((found != self.assignment[own]).sum())
            self.assignment[own] = found
        self._totals = self._result(sums)
        return moved

    def totals(self) -> ClusterSums:
        assert self._totals is not None
        return self._totals

    def _in_a_tree(self, sums: list[Any]) -> Any:
        """Adds pairs, and pairs of these, on the cluster."""
        while len(sums) > 1:
            pairs = [sums[first : first + 2] for first in range(0, len(sums), 2)]
            sums = [self._add.remote(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        return sums[0]

    def _result(self, call: Any) -> Any:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise_cause(error.cause)
        except self._ray.exceptions.RayError as error:
            raise Unavailable(
                f"the workers on Ray are lost over and over ({str(error).splitlines()[0]})",
                remedy="the same command goes on at the last finished iteration",
            ) from error


def _block_rows(num_rows: int, num_workers: int) -> int:
    return int(np.clip(-(-num_rows // (_BLOCKS_EACH * num_workers)), _LEAST_ROWS, _MOST_ROWS))


def _assigned(
    block: _Block, centers: Embeddings, previous: NDArray[np.int32] | None
) -> tuple[NDArray[np.int32], ClusterSums]:
    place, numbers, mean = block
    return assigned(UnitRows(SelectedRows(_rows_at(place), numbers), mean), centers, previous)


@lru_cache(maxsize=1)
def _rows_at(place: str) -> KeyedRows:
    """Opens the rows once for all calls in this process."""
    return KeyedRows(EmbeddingsArtifact.open(brought(place)))


def _added(one: ClusterSums, other: ClusterSums) -> ClusterSums:
    return ClusterSums(one.sums + other.sums, one.sizes + other.sizes)
