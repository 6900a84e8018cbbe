"""Finds the exact l nearest centers of each embedding, in a total order that does not depend on the
arithmetic.

The score is the inner product of the float32 values, computed in float64. The answer is the first l
centers by score descending, then id ascending: ties, duplicate centers included, go to the lower
id.

The scan computes products in float32 or eight-bit integers, block by block. Each row has a
threshold t, and the entries above it are its candidates. A row is proven if no omitted center can
belong to its answer. If inputs are rounded, a shift m, the mean of the centers, is subtracted from
each center c before: x.(c - m) orders the centers of a row x as x.c does, and the rounding error
grows with |c - m|. On the CPU m is subtracted from x as well, and m.(c - m) added
to the product. Let d = c - m, y = x or x - m, y' and d' their rounded values, a the product and
s the exact score. Then

    s - x.m <= a + |y - y'| |d| + |y'| |d - d'| + g |y'| D',

with D' = max |d'|, by Cauchy-Schwarz for the inputs and g = D u / (1 - D u) for the sum (Higham,
Accuracy and Stability, 3.1); `Slack` adds the float32 errors of x.m and m.d. The lowest score q of
any l centers, such as those of the largest products so far, is a lower bound of the l-th best
score. A center whose bound lies below q is not in the answer, so t is the largest a that, with max
|d| and max |d - d'|, keeps the bound below q; it rises as better centers are found. At the end, the
bound of each candidate, and then its float32 score, leave few candidates to score in float64.

A row with too many candidates is not proven. It goes through the float32 scan, and then through a
float64 scan, which settles any number of ties. The shortlists of a GPU
(`mlcd.clustering.device_scan`) or of compiled loops (`mlcd.clustering.compiled_scan`) may come
first.

Shapes: B rows of a batch, K centers, D dimension.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.arithmetics import (
    BLOCK_CENTERS,
    DEVICE,
    MatmulName,
    fastest_matmuls,
    open_device,
)
from mlcd.clustering.certificate import double_error
from mlcd.clustering.certified_scan import CertifiedScan
from mlcd.clustering.exact_scores import first_in_order, ordered
from mlcd.clustering.row_threads import batches, in_threads
from mlcd.clustering.rows import Rows
from mlcd.clustering.shortlist import Shortlister
from mlcd.errors import ConfigInvalid, InvalidInput, Unavailable
from mlcd.extras import install_command
from mlcd.types import Embeddings, Neighbors, ScanCounts

_log = logging.getLogger("mlcd.clustering")

_LEAST_ROWS: Final = 128  # fewest rows per batch of a thread
_DOUBLE_ENTRIES: Final = 1 << 22  # float64 scores in memory per thread: 32 MiB
_ROOM_LEAST: Final = 8  # a shortlist has room for answers of at least this many centers
_OPEN_SHARE: Final = (
    0.25  # share of open rows in a batch above which the next batch skips the first stage
)
_CHECKED_ROWS: Final = 4096  # at once
# Fewest rows of a call that may switch the scan to a faster way; smaller calls come one by one.
_LEAST_TO_TURN: Final = 256
WORTH_TORCH: Final = 2_500_000_000  # multiplications: 25 ms of two cores
# Multiplications: 12 s of two cores with AVX2. Loading compiled loops takes 1 s, and compiling them
# 6 to 11 s more, once per machine. With two cores, compiling meanwhile on a thread made a first
# k-means of 19 s slower by 3 s; in another process it saved 2 s and cost every later one 1 s.
WORTH_COMPILING: Final = 1_000_000_000_000
_IN_FLOAT32, _IN_FLOAT64 = 2, 3  # levels of ScanCounts, after proven and wider


def nearest_centers(
    embeddings: Embeddings,
    centers: Embeddings,
    top: int = 8,
    threshold: float | None = None,
) -> Neighbors:
    """Returns the `top` centers of highest cosine for each row: ids int32 [N, top], scores float32
    [N, top].

    The order is score descending, id ascending, decided on the float64 scores. Missing
    centers, and scores below `threshold`, are replaced by id -1 and score -inf. For several calls
    with the same centers, create one `CenterScan`.

    Raises InvalidInput for unequal dimensions or a value that is not finite, naming its row.
    """
    return CenterScan(centers).nearest(embeddings, top, threshold)


def nearest_with_distances(
    rows: Embeddings, centers: Embeddings
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Returns the nearest center of each row and the distance to it, 1 - cosine, [N] each."""
    neighbors = nearest_centers(rows, centers, 1)
    return neighbors.ids[:, 0].astype(np.int32), 1 - neighbors.scores[:, 0]


class CenterScan:
    """An index of centers for exact look-ups: checks, measures and rounds the centers once."""

    def __init__(
        self, centers: Embeddings, *, matmul: MatmulName | Literal["auto"] = "auto"
    ) -> None:
        """Checks and prepares the centers.

        matmul: arithmetic of the scan; auto starts in float32, and switches to a GPU or eight bits,
        and later to compiled loops, once the work is worth it.

        Raises InvalidInput for centers that are not finite, ConfigInvalid if torch or a GPU is
        missing.
        """
        check_rows(centers, "centers")
        self.centers = centers = np.ascontiguousarray(centers)  # libraries read them by address
        self._exact = CertifiedScan("numpy", centers)
        self._way = _Way(self._exact) if matmul == "auto" else self._open(matmul)
        # the faster ways, each with the amount of work at which it is opened
        self._ahead: list[tuple[int, Callable[[], _Way]]] = []
        if matmul == "auto":
            self._ahead = [(WORTH_TORCH, self._fastest), (WORTH_COMPILING, self._fastest_in_loops)]
        self._work, self._turning = 0, threading.Lock()

    @classmethod
    def compiled(cls, centers: Embeddings, matmul: MatmulName) -> "CenterScan":
        """Returns a scan in compiled loops over this arithmetic of the CPU. If numba fails, logs a
        warning and returns a scan without compiled loops.
        """
        scan = cls(centers, matmul=matmul)
        scan._way = scan._in_loops(scan._way)
        return scan

    @property
    def products(self) -> str:
        """Returns the name of the present way: its arithmetic, and whether it is compiled."""
        return self._way.name

    def nearest(
        self, embeddings: Embeddings, top: int = 8, threshold: float | None = None
    ) -> Neighbors:
        """Returns what `nearest_centers` returns for these centers."""
        check_query(embeddings, top, self.centers.shape[1])
        num_wanted = min(top, len(self.centers))
        float64 = threshold is not None
        way, ids, scores, levels = self._answer(embeddings, num_wanted, float64=float64)
        neighbors = as_neighbors(ids, scores, top, threshold)
        return replace(neighbors, scan=_count(way.name, levels))

    def search(
        self, embeddings: Embeddings, top: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Returns ids [N, top], float64 scores [N, top] and the level of `ScanCounts` that settled
        each row.

        embeddings: checked by `check_query`. top: at most the number of centers.
        """
        return self._answer(embeddings, top, float64=True)[1:]

    def _answer(
        self, embeddings: Embeddings, top: int, *, float64: bool
    ) -> "tuple[_Way, NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]":
        """Returns the way taken, and the results of `search`. float64: whether the caller needs
        scores in float64.
        """
        if self._ahead and top:
            self._turn(len(embeddings))
        way = self._way
        ids = np.full((len(embeddings), top), -1, dtype=np.int64)
        scores = np.full((len(embeddings), top), -np.inf)
        levels = np.zeros(len(embeddings), dtype=np.int64)
        first = 0

        def search(batch: slice) -> None:
            nonlocal first
            rows = np.ascontiguousarray(embeddings[batch])
            ids[batch], scores[batch], levels[batch] = self._search(
                way, rows, top, first, float64=float64
            )
            # The next batch skips a first stage that proves few rows: it costs more than it saves.
            first = int((levels[batch] > 0).mean() > _OPEN_SHARE)

        num_rows = len(embeddings) if top else 0
        in_threads(search, batches(num_rows, most=way.first.batch_rows, least=_LEAST_ROWS))
        return way, ids, scores, levels

    def _turn(self, num_rows: int) -> None:
        """Switches to a faster way once the work done so far makes it worthwhile."""
        self._work += num_rows * self.centers.size
        if num_rows < _LEAST_TO_TURN or not self._turning.acquire(blocking=False):
            return  # while another thread opens a way, the present way continues
        try:
            while self._ahead and self._work >= self._ahead[0][0]:
                _, open_way = self._ahead.pop(0)
                self._way = open_way()
        finally:
            self._turning.release()

    def _fastest(self, *, import_torch: bool | None = None) -> "_Way":
        """Returns the way with the fastest available arithmetic; it may be the present way."""
        for name in fastest_matmuls(self.centers, import_torch=import_torch):
            if self._way.lister is not None or name == self._way.scan.arithmetic:
                break
            with suppress(Unavailable):  # the GPU has no memory left
                return self._open(name)
        return self._way

    def _fastest_in_loops(self) -> "_Way":
        """Returns the way of `_fastest`, with compiled loops unless it uses a GPU. Imports torch
        even for few centers.
        """
        if find_spec("numba") is None:
            return self._way
        return self._in_loops(self._fastest(import_torch=True))

    def _in_loops(self, way: "_Way") -> "_Way":
        """Returns this way with compiled loops. Returns it unchanged if it uses a GPU, or, with a
        warning, if numba fails.
        """
        if way.lister is not None:
            return way
        try:
            from mlcd.clustering.compiled_scan import CompiledScan

            loops = CompiledScan(way.scan)
            # compiles each loop, or loads it from the cache
            loops.shortlist(self.centers[:1], 1, 1)
        except Exception as error:  # noqa: BLE001 - the plain way needs none of this
            # numba may be too old for this numpy, the disk may be full, or cached files damaged
            _log.warning("the scan continues without compiled loops, which fail: %r", error)
            return way
        return _Way(way.scan, loops)

    def _open(self, name: MatmulName) -> "_Way":
        if name == DEVICE:  # the CPU settles the rows that the GPU leaves open
            return _Way(self._exact, open_device(self.centers))
        return _Way(self._exact if name == "numpy" else CertifiedScan(name, self.centers))

    def _search(
        self, way: "_Way", z_BD: Embeddings, top: int, first: int, *, float64: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Returns ids [B, top], float64 scores [B, top] and the level that settled each row [B].

        Each stage scans the rows that earlier stages left open. first: index of the first stage.
        """
        ids = np.full((len(z_BD), top), -1, dtype=np.int64)
        scores = np.full((len(z_BD), top), -np.inf)
        levels = np.full(len(z_BD), _IN_FLOAT64)
        stages, open_rows = self._stages(way), np.arange(len(z_BD))
        for level, lister, room in stages[min(first, len(stages) - 1) :]:
            if len(open_rows) == 0:
                break
            part_BD = z_BD if len(open_rows) == len(z_BD) else z_BD[open_rows]
            shortlist = lister.shortlist(part_BD, top, room * max(top, _ROOM_LEAST))
            is_sure = shortlist.sure
            if not float64 or lister.sums_in_order:
                unclear = np.flatnonzero(is_sure & ~shortlist.clear)
            else:
                unclear = np.flatnonzero(is_sure)
            part_ids, part_scores = shortlist.ids[:, :top], shortlist.scores[:, :top]
            if len(unclear):
                part_ids, part_scores = part_ids.copy(), part_scores.copy()
                rows, places = np.nonzero(shortlist.ids[unclear] >= 0)
                columns = shortlist.ids[unclear[rows], places]
                part_ids[unclear], part_scores[unclear] = ordered(
                    part_BD[unclear], self.centers, rows, columns, top
                )
            settled = open_rows[is_sure]
            ids[settled], scores[settled] = part_ids[is_sure], part_scores[is_sure]
            levels[settled] = level
            open_rows = open_rows[~is_sure]
        if len(open_rows):
            ids[open_rows], scores[open_rows] = self._in_float64(z_BD[open_rows], top)
        return ids, scores, levels

    def _stages(self, way: "_Way") -> list[tuple[int, Shortlister, int]]:
        """Returns the scans to run in order, each with its level in `ScanCounts` and its room."""
        stages: list[tuple[int, Shortlister, int]] = []
        if way.lister is not None:
            stages = [(min(n, 1), way.lister, room) for n, room in enumerate(way.lister.rooms)]
        (room,) = way.scan.rooms
        if way.scan is not self._exact:
            stages.append((min(len(stages), 1), way.scan, room))
        stages.append((_IN_FLOAT32 if stages else 0, self._exact, room))
        return stages

    def _in_float64(
        self, z_BD: Embeddings, top: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Computes all scores in float64, and those still in doubt again in one fixed order of
        summation.
        """
        rows_per_part = max(1, _DOUBLE_ENTRIES // len(self.centers))
        parts = []
        for start in range(0, len(z_BD), rows_per_part):
            part_BD = z_BD[start : start + rows_per_part]
            scores_BK = np.concatenate(
                [
                    part_BD.astype(np.float64)
                    @ self.centers[first : first + BLOCK_CENTERS].astype(np.float64).T
                    for first in range(0, len(self.centers), BLOCK_CENTERS)
                ],
                axis=1,
            )
            last_B = np.partition(scores_BK, -top, axis=1)[:, -top]
            least_B = last_B - double_error(part_BD, self._exact.norms)
            rows, columns = np.nonzero(scores_BK >= least_B[:, None])
            parts.append(ordered(part_BD, self.centers, rows, columns, top))
        return np.concatenate([ids for ids, _ in parts]), np.concatenate(
            [scores for _, scores in parts]
        )


@dataclass(frozen=True)
class _Way:
    """A scan, and the shortlister that runs before it (None for none)."""

    scan: CertifiedScan
    lister: Shortlister | None = None

    @property
    def first(self) -> Shortlister:
        return self.lister or self.scan

    @property
    def name(self) -> str:
        return self.first.name


class BlockedScan:
    """The exact scan of centers [K, D] that do not fit in memory: reads `at_once` at a time.

    Each block returns its nearest centers with float64 scores. The best of all blocks equal the
    result of one scan of all centers, bit for bit.
    """

    def __init__(self, centers: Rows, at_once: int) -> None:
        self._centers, self._at_once = centers, at_once

    def nearest(
        self, embeddings: Embeddings, top: int = 8, threshold: float | None = None
    ) -> Neighbors:
        """Returns what `CenterScan.nearest` returns for all centers. The level of a
        row is the highest level among its blocks.
        """
        check_query(embeddings, top, self._centers.dimension)
        ids = np.full((len(embeddings), top), -1, np.int64)
        scores = np.full((len(embeddings), top), -np.inf)
        levels, products = np.zeros(len(embeddings), np.int64), ""
        for start in range(0, self._centers.num_rows, self._at_once):
            stop = min(start + self._at_once, self._centers.num_rows)
            scan = CenterScan(self._centers.read(np.arange(start, stop)))
            in_block = scan.search(embeddings, min(top, stop - start))
            ids, scores = first_in_order(
                np.hstack([ids, start + in_block[0]]), np.hstack([scores, in_block[1]]), top
            )
            levels, products = np.maximum(levels, in_block[2]), scan.products
        neighbors = as_neighbors(ids, scores, top, threshold)
        return replace(neighbors, scan=_count(products, levels))


def as_neighbors(
    ids: NDArray[np.int64], scores: NDArray[np.float64], top: int, threshold: float | None
) -> Neighbors:
    """Returns the neighbors that reach the threshold, in `top` columns padded with -1 and -inf."""
    if threshold is not None:  # compares the scores before rounding
        ids = np.where(scores >= threshold, ids, -1)
        scores = np.where(scores >= threshold, scores, -np.inf)
    all_ids = np.full((len(ids), top), -1, dtype=np.int32)
    all_scores = np.full((len(ids), top), -np.inf, dtype=np.float32)
    all_ids[:, : ids.shape[1]], all_scores[:, : ids.shape[1]] = ids, scores
    all_scores += np.float32(0)  # -0.0 becomes 0.0: its sign depends on the order of summation
    return Neighbors(all_ids, all_scores)


def _count(products: str, levels: NDArray[np.int64]) -> ScanCounts:
    return ScanCounts(products, *np.bincount(levels, minlength=_IN_FLOAT64 + 1).tolist())


def compile_loops() -> None:
    """Compiles the loops of every arithmetic of this CPU, or loads them from their cache.

    Raises ConfigInvalid if numba is not installed.
    """
    if find_spec("numba") is None:
        raise ConfigInvalid("compiled loops need numba", remedy=install_command("compiled"))
    centers = np.eye(BLOCK_CENTERS, 64, dtype=np.float32) + 1
    for name in fastest_matmuls(centers, import_torch=True):
        if name != DEVICE:
            CenterScan.compiled(centers, name)


def check_query(embeddings: Embeddings, top: int, dimension: int) -> None:
    """Raises ConfigInvalid or InvalidInput unless centers of this dimension can be scanned."""
    if top < 1:
        raise ConfigInvalid(f"top must be at least 1, got {top}")
    check_rows(embeddings, "embeddings")
    if embeddings.shape[1] != dimension:
        raise InvalidInput(
            f"embeddings have dimension {embeddings.shape[1]}, centers {dimension}",
            remedy="use the centers of the same model",
        )


def check_rows(rows: NDArray[np.floating], what: str) -> None:
    """Raises InvalidInput unless `rows` is a float32 matrix of finite values."""
    if rows.ndim != 2 or rows.dtype != np.float32:
        raise InvalidInput(f"{what} must be a float32 matrix, got {rows.dtype} {list(rows.shape)}")
    # One block at a time bounds the memory of the check.
    for start in range(0, len(rows), _CHECKED_ROWS):
        block = rows[start : start + _CHECKED_ROWS]
        # NaN and Inf remain in a sum of squares, which costs a fraction of a mask.
        flat = block.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.dot(flat, flat)):
                continue
        finite = np.isfinite(block).all(axis=1)
        if not finite.all():
            row = start + int(np.flatnonzero(~finite)[0])
            raise InvalidInput(f"{what} row {row} holds NaN or Inf", remedy="remove it")
