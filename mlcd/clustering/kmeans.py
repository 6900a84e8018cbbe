"""Spherical k-means: maximizes J = (1/n) sum_i max_k <x_i, c_k> over unit centers.

This is Lloyd's iteration with exact assignment. Rows are read block by block. Memory holds one
block (or all rows if they are few), the centers, their sums, and 4 bytes per row for the last
assignment, which makes the next one faster. On a GPU rows and sums stay there
(`mlcd.clustering.device_members`). Rows are summed as integers, which is exact in any
order: the centers depend only on the rows, the seed and the number of clusters, and not on batch
size, threads or processes.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.arithmetics import DEVICE, MatmulName, fastest_matmuls
from mlcd.clustering.exact_scores import exact_scores
from mlcd.clustering.heads import Heads
from mlcd.clustering.nearest import WORTH_COMPILING, CenterScan
from mlcd.clustering.nearest_center import NearestCenter, heads_of
from mlcd.clustering.quality import imbalance
from mlcd.clustering.repair import next_centers
from mlcd.clustering.rows import BLOCK_ROWS, ArrayRows, Rows, UnitRows, kept_bytes
from mlcd.clustering.seeding import SAMPLE_PER_CENTER, distinct_rows, two_level
from mlcd.clustering.sums import ClusterSums
from mlcd.errors import ConfigInvalid, InvalidInput, Unavailable
from mlcd.types import Embeddings
from mlcd.world import World

if TYPE_CHECKING:
    from mlcd.clustering.device_members import DeviceMembers

_log = logging.getLogger("mlcd.clustering")

MANY_CLUSTERS: Final = 16_384  # above this, the initial centers are found in two levels
# also from this number on, if there are many rows per cluster: an objective is reached sooner from
# there, and a higher one in the end
_SEVERAL_CLUSTERS: Final = 64
_CELL_ITERATIONS: Final = 6  # of each clustering of the two-level start; more fit the sample alone
# rows of one process; for fewer, heads (`mlcd.clustering.heads`: components along a few main
# directions, which bound the inner products) cost more than they save
_MANY_ROWS: Final = 16_384
_MANY_CENTERS: Final = 4096  # for fewer, eight bits or a GPU gain only over many passes
# 1 - J below this is only the float32 rounding of the rows' unit length
_LEAST_DISTANCE: Final = 2.0**-24
_ALONE: Final = World()
_DEVICE: str = "cuda"  # tests take "cpu"
_ROWS_ON_DEVICE: int | None = None  # bytes; None for as many rows as fit

_NearestTo = Callable[[Embeddings, NDArray[np.int32] | None], NDArray[np.int32]]
_OpenScan = Callable[[Embeddings, MatmulName], CenterScan]


@dataclass(frozen=True)
class State:
    """The state of a clustering, as saved in a checkpoint.

    centers: centers of this iteration, [K, D]. objective: J of the centers of each earlier
    iteration. repaired: number of centers replaced in this iteration.
    """

    centers: Embeddings
    iteration: int = 0
    objective: tuple[float, ...] = ()
    repaired: int = 0
    num_splits: int = 0


@dataclass(frozen=True)
class Progress:
    """The measurements of one iteration.

    objective and imbalance belong to its centers; moved counts the rows whose center changed.
    """

    iteration: int
    objective: float
    imbalance: float
    moved: int
    rows_per_s: float


@dataclass(frozen=True)
class KMeansResult:
    """The centers and their measurements.

    centers: [K, D] unit rows. sizes: [K] int64, the members of each center. assignment: [N] int32,
    the center of each row; each of several processes has only its own rows (`World.own_rows`).
    cosines: [K] float64, the mean inner product of a center and its members, NaN if it has none.
    objective: J before each update, and J of the final centers last. num_splits: number of empty
    clusters that were refilled.
    """

    centers: Embeddings
    sizes: NDArray[np.int64]
    cosines: NDArray[np.float64]
    assignment: NDArray[np.int32]
    objective: tuple[float, ...]
    num_splits: int


class MemberSums(Protocol):
    """The center of each row, and the sums of each center's rows."""

    @property
    def assignment(self) -> NDArray[np.int32]: ...

    def assign(self, centers: Embeddings) -> int:
        """Assigns every row to its nearest center; returns the number of rows of all processes
        whose center changed.
        """
        ...

    def totals(self) -> ClusterSums:
        """Returns the sums over all processes."""
        ...


def kmeans(
    rows: Rows | Sequence[Embeddings],
    num_clusters: int,
    *,
    iterations: int = 25,
    seed: int = 0,
    tolerance: float = 5e-6,
    start: Embeddings | State | None = None,
    world: World = _ALONE,
    members: MemberSums | None = None,
    on_start: Callable[[State], None] = lambda _: None,
    on_iteration: Callable[[Progress], None] = lambda _: None,
) -> KMeansResult:
    """Clusters rows, given as blocks of float32 [n, D] or as `Rows`. Rows are normalized to unit
    length.

    The iteration ends after `iterations` updates, or when an update increases J by less than
    tolerance * (1 - J). start: the initial centers, or the state to continue from. on_start: called
    with the state at the start of every iteration. world: the processes that share the rows.
    members: assigns and sums rows in place of this process.

    Raises InvalidInput for the first row that is not finite or is zero, and for more clusters than
    distinct rows.
    """
    if num_clusters < 1:
        raise ConfigInvalid(f"num_clusters must be at least 1, got {num_clusters}")
    if iterations < 0:
        raise ConfigInvalid(f"iterations must be at least 0, got {iterations}")
    unit = _as_unit_rows(rows)
    if unit.num_rows == 0:
        raise InvalidInput("rows must have at least 1 row, got 0", remedy="give embeddings")
    state = (
        start
        if isinstance(start, State)
        else State(_first_centers(unit, num_clusters, seed, start, world))
    )
    num_passes = iterations - state.iteration + 1
    members = members or _OwnMembers(unit, num_clusters, world, num_passes)
    while True:
        check_equal(world, state.centers, state.iteration)
        on_start(state)
        began = time.perf_counter()
        moved = members.assign(state.centers)
        totals = members.totals()
        objective = totals.objective(state.centers)
        history = (*state.objective, objective)
        speed = unit.num_rows / (time.perf_counter() - began)
        on_iteration(Progress(state.iteration, objective, imbalance(totals.sizes), moved, speed))
        if state.iteration == iterations or _has_settled(history, state.repaired, tolerance):
            cosines = totals.cosines(state.centers)
            return KMeansResult(
                state.centers, totals.sizes, cosines, members.assignment, history, state.num_splits
            )
        centers, repaired = next_centers(totals, state.centers, seed, state.iteration)
        state = State(centers, state.iteration + 1, history, repaired, state.num_splits + repaired)


class _OwnMembers:
    """The `MemberSums` of the rows of this process, on a GPU if `_Nearest` prefers one and it has
    memory for the sums, otherwise on the host.
    """

    def __init__(self, rows: Rows, num_clusters: int, world: World, num_passes: int) -> None:
        self._rows, self._world = rows, world
        self._on_host = _HostMembers(rows, num_clusters, world, num_passes)
        self._on_device: DeviceMembers | None = None
        self._tries_device = True

    @property
    def assignment(self) -> NDArray[np.int32]:
        return (self._on_device or self._on_host).assignment

    def assign(self, centers: Embeddings) -> int:
        if self._tries_device and self._on_host.nearest.uses_gpu(centers):
            try:
                return self._sum_moved(self._assign_on_device(centers))
            except Unavailable as error:
                _log.warning("k-means sums on the CPU: %s", error)
        self._tries_device, self._on_device = False, None
        return self._sum_moved(self._on_host.assign(centers))

    def _assign_on_device(self, centers: Embeddings) -> int:
        if self._on_device is None:
            from mlcd.clustering.device_members import DeviceMembers

            self._on_device = DeviceMembers(
                self._rows, len(centers), self._world, _DEVICE, _ROWS_ON_DEVICE
            )
        return self._on_device.assign(centers)

    def _sum_moved(self, moved: int) -> int:
        return int(self._world.sum_integers(np.array([moved]))[0])

    def totals(self) -> ClusterSums:
        return (self._on_device or self._on_host).totals().check()


class _HostMembers:
    """The rows of this process, summed on the host; the sums are updated row by row."""

    def __init__(self, rows: Rows, num_clusters: int, world: World, num_passes: int) -> None:
        self._rows, self._world = rows, world
        self._shape = (num_clusters, rows.dimension)
        self._start, self._stop = world.own_rows(rows.num_rows)
        self._sums: ClusterSums | None = None
        self.nearest = _Nearest(self._stop - self._start, num_passes)
        self._kept: list[tuple[int, Embeddings]] = []
        self.assignment = np.full(self._stop - self._start, -1, dtype=np.int32)

    def assign(self, centers: Embeddings) -> int:
        """Returns the number of this process's rows whose center changed."""
        nearest_to, moved = self.nearest.open(centers), 0
        sums = self._sums = self._sums or ClusterSums.zeros(*self._shape)
        for start, block in self._blocks():
            own = self.assignment[start - self._start :][: len(block)]
            has_ids = own[0] >= 0
            nearest = nearest_to(block, own if has_ids else None)
            changed = np.flatnonzero(nearest != own)
            rows = block[changed] if has_ids else block
            if has_ids:
                sums.subtract(rows, own[changed])
            sums.add(rows, nearest[changed])
            moved += len(changed)
            own[:] = nearest
        return moved

    def _blocks(self) -> Iterable[tuple[int, Embeddings]]:
        """Returns the rows of this process in blocks. Few rows stay in memory for all passes."""
        blocks = self._rows.blocks(self._start, self._stop)
        if not kept_bytes(self._stop - self._start, self._rows.dimension):
            return blocks
        self._kept = self._kept or list(blocks)
        return self._kept

    def totals(self) -> ClusterSums:
        sums = self._sums or ClusterSums.zeros(*self._shape)
        return ClusterSums(
            self._world.sum_integers(sums.sums), self._world.sum_integers(sums.sizes)
        )


def assign(
    rows: Rows, centers: Embeddings, previous: NDArray[np.int32] | None
) -> tuple[NDArray[np.int32], ClusterSums]:
    """Returns the nearest center of each row, and the sums of each center's rows.

    previous: the rows' centers of the last assignment, which make the search faster.
    """
    assignment = np.empty(rows.num_rows, np.int32)
    sums, nearest_to = ClusterSums.zeros(*centers.shape), _Nearest(rows.num_rows).open(centers)
    for start, block in rows.blocks(0, rows.num_rows):
        own = slice(start, start + len(block))
        assignment[own] = nearest_to(block, None if previous is None else previous[own])
        sums.add(block, assignment[own])
    return assignment, sums


def assign_in_block(
    rows: Rows, centers: Embeddings, first: int
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Returns each row's nearest center of a block, and its exact score. first: id of the block's
    first center.
    """
    assignment, scores = np.empty(rows.num_rows, np.int32), np.empty(rows.num_rows)
    nearest_to = _Nearest(rows.num_rows).open(centers)
    for start, block in rows.blocks(0, rows.num_rows):
        own = slice(start, start + len(block))
        ids = nearest_to(block, None)
        assignment[own] = first + ids
        scores[own] = exact_scores(block, centers, np.arange(len(block)), ids)
    return assignment, scores


def nearest_of_blocks(
    *blocks: tuple[NDArray[np.int32], NDArray[np.float64]],
) -> NDArray[np.int32]:
    """Returns the center of highest score of each row. Ties go to the lowest id.

    blocks: results of `assign_in_block`, in ascending order of the blocks.
    """
    (best, highest), *other_blocks = ((ids.copy(), scores.copy()) for ids, scores in blocks)
    for ids, scores in other_blocks:
        higher = scores > highest
        best[higher], highest[higher] = ids[higher], scores[higher]
    return best


def sum_in_block(rows: Rows, assignment: NDArray[np.int32], centers: range) -> ClusterSums:
    """Returns the sums of the rows of these centers. assignment: the center of each row."""
    sums = ClusterSums.zeros(len(centers), rows.dimension)
    own = np.flatnonzero((assignment >= centers.start) & (assignment < centers.stop))
    for start in range(0, len(own), BLOCK_ROWS):
        part = own[start : start + BLOCK_ROWS]
        sums.add(rows.read(part), assignment[part] - centers.start)
    return sums


class _Nearest:
    """Searches the exact nearest center in the fastest way for the machine and the work; all ways
    return the same ids. A GPU is preferred. Otherwise heads rule centers out (`NearestCenter`);
    rows with many remaining centers are scored against all, in eight bits if torch supports it.
    """

    def __init__(self, num_rows: int, num_passes: int = 1) -> None:
        """num_passes: maximum number of passes over the rows; compiled loops do not pay off in a
        single pass.
        """
        self._num_rows, self._most_passes = num_rows, num_passes
        self._matmul: MatmulName | None = None
        self._open_scan: _OpenScan = _plain_scan
        self._heads: Heads | None = None
        self._tries_heads = num_rows >= _MANY_ROWS
        self._latest: NearestCenter | None = None

    def uses_gpu(self, centers: Embeddings) -> bool:
        """Returns whether a GPU is the fastest for these centers; the first call decides."""
        if self._matmul is None:
            self._matmul, self._open_scan = self._choose_scan(centers)
        return self._matmul == DEVICE

    def open(self, centers: Embeddings) -> _NearestTo:
        """Returns a function from rows [N, D] and their previous center ids ([N] or None) to ids,
        int32 [N].
        """
        if self.uses_gpu(centers):
            with suppress(Unavailable):  # the GPU has no memory left
                on_gpu = self._open_scan(centers, DEVICE)
                return lambda rows, _: _by_scan(on_gpu, rows)
        heads = self._choose_heads(centers)
        if self._matmul != "torch-int8":
            self._latest = NearestCenter(centers, heads)
            return self._latest.nearest
        scan: list[CenterScan] = []  # opened at first use

        def search_all(rows: Embeddings) -> NDArray[np.int32]:
            if not scan:
                scan.append(self._open_scan(centers, "torch-int8"))
            return _by_scan(scan[0], rows)

        self._latest = NearestCenter(centers, heads, search_all)
        return self._latest.nearest

    def _choose_heads(self, centers: Embeddings) -> Heads | None:
        """Returns the heads to try in the next pass; None once they were of little use in one."""
        if not self._tries_heads:
            return None
        if self._heads is None:
            self._heads = heads_of(centers)
        elif self._latest is not None and self._latest.skips_heads:
            self._heads, self._tries_heads = None, False
        return self._heads

    def _choose_scan(self, centers: Embeddings) -> "tuple[MatmulName, _OpenScan]":
        """Returns the arithmetic for scoring rows against all centers, and a function that opens a
        scan in it. In float32, `NearestCenter` is used, which does less work than a scan.
        """
        work = self._num_rows * self._most_passes * centers.size
        is_long = self._most_passes > 1 and work >= WORTH_COMPILING
        if len(centers) < _MANY_CENTERS and not is_long:
            return "numpy", _plain_scan
        name = fastest_matmuls(centers, import_torch=is_long or None)[0]
        if is_long and name == "torch-int8" and find_spec("numba") is not None:
            return name, _compiled_scan
        return name, _plain_scan


def _compiled_scan(centers: Embeddings, name: MatmulName) -> CenterScan:
    return CenterScan.compiled(centers, name)


def _plain_scan(centers: Embeddings, name: MatmulName) -> CenterScan:
    return CenterScan(centers, matmul=name)


def _by_scan(scan: CenterScan, rows: Embeddings) -> NDArray[np.int32]:
    return scan.nearest(rows, 1).ids[:, 0].astype(np.int32)


def _as_unit_rows(rows: Rows | Sequence[Embeddings]) -> UnitRows:
    if isinstance(rows, UnitRows):
        return rows
    return UnitRows(ArrayRows(rows) if isinstance(rows, Sequence) else rows)


def _first_centers(
    rows: Rows, num_clusters: int, seed: int, start: Embeddings | None, world: World
) -> Embeddings:
    if start is not None:
        if start.shape != (num_clusters, rows.dimension):
            raise InvalidInput(
                f"first centers must have shape {[num_clusters, rows.dimension]}, "
                f"got {list(start.shape)}"
            )
        return UnitRows(ArrayRows([start])).read(np.arange(num_clusters))
    rows_abound = rows.num_rows >= SAMPLE_PER_CENTER * num_clusters
    if num_clusters > MANY_CLUSTERS or (num_clusters >= _SEVERAL_CLUSTERS and rows_abound):
        return two_level(rows, num_clusters, seed, _one_level, world)
    return distinct_rows(rows, num_clusters, seed)


def _one_level(rows: Rows, num_clusters: int, seed: int) -> Embeddings:
    first = distinct_rows(rows, num_clusters, seed)
    return kmeans(rows, num_clusters, iterations=_CELL_ITERATIONS, seed=seed, start=first).centers


def _has_settled(history: tuple[float, ...], repaired: int, tolerance: float) -> bool:
    """Tells whether an update increased J by less than tolerance * (1 - J).

    Relative to J, the test would stop at once for rows in a narrow cone, where J is near 1 from the
    start.
    """
    gain = history[-1] - history[-2] if len(history) > 1 else math.inf
    return not repaired and gain < tolerance * max(1.0 - history[-1], _LEAST_DISTANCE)


def check_equal(world: World, centers: Embeddings, iteration: int) -> None:
    """Raises Unavailable unless all processes have the same centers, byte for byte."""
    digests = np.zeros((world.size, 4), dtype=np.int64)
    digests[world.rank] = np.frombuffer(
        hashlib.sha256(np.ascontiguousarray(centers).data).digest(), dtype=np.int64
    )
    digests = world.sum_integers(digests)
    if differing := [rank for rank in range(world.size) if (digests[rank] != digests[0]).any()]:
        raise Unavailable(
            f"after iteration {iteration} the centers of process {differing[0]} differ from the"
            " centers of process 0",
            remedy="run the same versions of mlcd and numpy on the same kind of CPU in all"
            " processes",
        )
