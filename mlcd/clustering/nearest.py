"""The exact l nearest centers of each embedding, in one total order, whatever arithmetic finds
them.

The score is the inner product of the float32 values, computed in float64. The answer is the first l
centers by score descending, then id ascending: ties, duplicate centers included, go to the lower
id.

The scan computes products in float32 or eight-bit integers, block by block. Each row has
a threshold t, and entries above it are kept, at most M of them. A row is proven where nothing left
out can belong to its answer. Where inputs are rounded, a shift m, the mean of the centers, is
subtracted from each center c before: x.(c - m) orders the centers of a row x as x.c does, and what
rounding loses grows with |c - m|. On the CPU m is subtracted from x as well, and m.(c - m) added
to the product. Let d = c - m, y = x or x - m, y' and d' their rounded values, a the product and
s the exact score. Then

    s - x.m <= a + |y - y'| |d| + |y'| |d - d'| + g |y'| D',

with D' = max |d'|, by Cauchy-Schwarz for the inputs and g = D u / (1 - D u) for the sum (Higham,
Accuracy and Stability, 3.1); `Slack` adds what x.m and m.d lose in float32. Any l centers bound the
l-th best score from below by q, the least of their own: the last labels, or those of largest
product so far. A center whose bound lies below q is not of the answer, so t is the largest a that,
with max |d| and max |d - d'|, keeps the bound below q; it rises as better centers are known. Where
more than M entries exceed it, t becomes the M-th of them. If the bound at a = t lies below the l-th
best float64 score among the kept, the answer is among them. Of these the bounds of each center, and
then float32 scores, leave few for float64. Rows that are not proven go through a wider scan, then a
float32 one, then a float64 one that settles any number of ties. A GPU's shortlists
(`mlcd.clustering.device_scan`) or those of compiled loops (`mlcd.clustering.compiled_scan`) may
come first.

Shapes: B rows of a batch, K centers, D dimension.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Final, Literal, TypeAlias

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
from mlcd.clustering.certified_scan import CertifiedAnswers, CertifiedScan
from mlcd.clustering.exact_scores import ordered
from mlcd.clustering.query_checks import check_query, check_rows
from mlcd.clustering.row_threads import batches, in_threads
from mlcd.clustering.shortlist import Shortlister
from mlcd.errors import Unavailable
from mlcd.types import Embeddings, Neighbors, ScanCounts

_log = logging.getLogger("mlcd.clustering")

_BATCH_ROWS: Final = 1024
_LEAST_ROWS: Final = 128  # of a thread's batch
_DOUBLE_ENTRIES: Final = 1 << 22  # float64 scores that a thread holds at once: 32 MiB
# Entries kept for each of the answer, and at least, by whether inputs are rounded: only those
# within the error of the answer, so that room costs little.
_KEPT_EACH: Final = {False: 4, True: 24}
_KEPT_LEAST: Final = {False: 32, True: 64}
_WIDER: Final = 4
_ROOM_LEAST: Final = 8  # of the answer, for which a shortlist has room
_OPEN_SHARE: Final = 0.25  # a wider pass costs about half as much again as the first
# Rows of a call, with fewer of which a scan does not turn to a faster way: they come one by one.
_LEAST_TO_TURN: Final = 256
WORTH_TORCH: Final = 2_500_000_000  # multiplications: 25 ms of two cores
# Multiplications: 12 s of two cores with AVX2. To load compiled loops takes 1 s, and to compile
# them 6 to 11 more, once on a machine.
WORTH_COMPILING: Final = 1_000_000_000_000
_NUM_LEVELS: Final = 4  # those of ScanCounts: proven, wider, float32, float64


def nearest_centers(
    embeddings: Embeddings,
    centers: Embeddings,
    top: int = 8,
    threshold: float | None = None,
) -> Neighbors:
    """Returns the `top` centers of highest cosine for each row: ids int32 [N, top], scores float32
    [N, top].

    The order is score descending, id ascending, decided on the float64 scores. Where there are
    fewer than `top` centers, or their score is below `threshold`, the id is -1 and the score -inf.
    For several calls with the same centers make one `CenterScan`.

    Raises InvalidInput for another dimension or values that are not finite, naming the first such
    row.
    """
    return CenterScan(centers, matmul="numpy").nearest(embeddings, top, threshold)


class CenterScan:
    """A set of centers made ready for exact look-ups: checked, measured and rounded once."""

    def __init__(
        self, centers: Embeddings, *, matmul: MatmulName | Literal["auto"] = "auto"
    ) -> None:
        """Checks and prepares the centers.

        matmul: the arithmetic of the scan; auto multiplies in float32 until the rows seen are work
        enough for a GPU or eight bits, and later for compiled loops.

        Raises InvalidInput for centers that are not finite, ConfigInvalid where torch or a GPU is
        missing.
        """
        check_rows(centers, "centers")
        self.centers = centers = np.ascontiguousarray(centers)  # libraries read them by address
        self._exact = CertifiedScan("numpy", centers)
        self._way = _Way(self._exact) if matmul == "auto" else self._open(matmul)
        # the faster ways, each with the work after which it is opened
        self._ahead: list[tuple[int, Callable[[], _Way]]] = []
        if matmul == "auto":
            self._ahead = [(WORTH_TORCH, self._fastest), (WORTH_COMPILING, self._fastest_in_loops)]
        self._work, self._turning = 0, threading.Lock()

    @classmethod
    def compiled(cls, centers: Embeddings, matmul: MatmulName) -> "CenterScan":
        """Returns a scan in compiled loops over this arithmetic of the CPU; without them where
        numba fails, which a warning says.
        """
        scan = cls(centers, matmul=matmul)
        scan._way = scan._in_loops(scan._way)
        return scan

    @property
    def products(self) -> str:
        """Returns the name of the arithmetic, and of what else the present way has."""
        return self._way.name

    def nearest(
        self, embeddings: Embeddings, top: int = 8, threshold: float | None = None
    ) -> Neighbors:
        """Returns what `nearest_centers` returns for these centers."""
        check_query(embeddings, top, self.centers.shape[1])
        num_wanted = min(top, len(self.centers))
        # a threshold is compared with the scores before they are rounded
        float64 = threshold is not None
        way, ids, exact, level = self._answer(embeddings, num_wanted, float64=float64)
        if threshold is not None:
            ids = np.where(exact >= threshold, ids, -1)
            exact = np.where(exact >= threshold, exact, -np.inf)
        all_ids = np.full((len(embeddings), top), -1, dtype=np.int32)
        all_scores = np.full((len(embeddings), top), -np.inf, dtype=np.float32)
        all_ids[:, :num_wanted], all_scores[:, :num_wanted] = ids, exact
        all_scores += np.float32(0)  # -0.0 becomes 0.0: its sign depends on the order of summation
        counts = np.bincount(level, minlength=_NUM_LEVELS)
        return Neighbors(all_ids, all_scores, ScanCounts(way.name, *counts.tolist()))

    def search(
        self, embeddings: Embeddings, top: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Returns ids [N, top], float64 scores [N, top] and the level of `ScanCounts` that settled
        each row.

        embeddings: such as `check_query` has let pass. top: not more than there are centers.
        """
        return self._answer(embeddings, top, float64=True)[1:]

    def _answer(
        self,
        embeddings: Embeddings,
        top: int,
        *,
        float64: bool,
    ) -> "tuple[_Way, NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]":
        """Returns the way taken, and what `search` does. float64: false where scores are wanted in
        float32 alone.
        """
        if self._ahead and top:
            self._turn(len(embeddings))
        way = self._way
        ids = np.full((len(embeddings), top), -1, dtype=np.int64)
        scores = np.full((len(embeddings), top), -np.inf)
        level = np.zeros(len(embeddings), dtype=np.int64)
        first = 0

        def search(batch: slice) -> None:
            nonlocal first
            rows = np.ascontiguousarray(embeddings[batch])
            ids[batch], scores[batch], level[batch] = self._search(
                way, rows, top, first, float64=float64
            )
            # A first pass that proves little is left out for the next batch: it would cost more
            # than it settles.
            first = int((level[batch] > 0).mean() > _OPEN_SHARE)

        num_rows = len(embeddings) if top else 0
        most = _BATCH_ROWS if way.lister is None else way.lister.batch_rows
        in_threads(search, batches(num_rows, most=most, least=_LEAST_ROWS))
        return way, ids, scores, level

    def _turn(self, num_rows: int) -> None:
        """Turns to a faster way once the rows seen have been work enough for it."""
        self._work += num_rows * self.centers.size
        if num_rows < _LEAST_TO_TURN or not self._turning.acquire(blocking=False):
            return  # where another thread opens a way, the present one goes on
        try:
            while self._ahead and self._work >= self._ahead[0][0]:
                _, open_way = self._ahead.pop(0)
                self._way = open_way()
        finally:
            self._turning.release()

    def _fastest(self, *, import_torch: bool | None = None) -> "_Way":
        """Returns the way by the fastest arithmetic at hand; the present one where that is it."""
        for name in fastest_matmuls(self.centers, import_torch=import_torch):
            if self._way.lister is not None or name == self._way.scan.name:
                break
            with suppress(Unavailable):  # a GPU that has no room
                return self._open(name)
        return self._way

    def _fastest_in_loops(self) -> "_Way":
        """Returns what `_fastest` does, with compiled loops where there is no GPU. For these, torch
        is imported even where centers are few.
        """
        if find_spec("numba") is None:
            return self._way
        return self._in_loops(self._fastest(import_torch=True))

    def _in_loops(self, way: "_Way") -> "_Way":
        """Returns this way with compiled loops; as it is where there is a GPU or numba fails, which
        a warning says.
        """
        if way.lister is not None:
            return way
        try:
            from mlcd.clustering.compiled_scan import CompiledScan

            loops = CompiledScan(way.scan)
            # each loop is compiled now, or read where it is kept
            loops.shortlist(self.centers[:1], 1, 1)
        except Exception as error:  # noqa: BLE001 - the plain way needs none of this
            # numba may be too old for this numpy, find no room for what it makes, or damaged files
            _log.warning("the scan goes on without compiled loops, which fail: %r", error)
            return way
        return _Way(way.scan, loops)

    def _open(self, name: MatmulName) -> "_Way":
        if name == DEVICE:  # what it leaves open, the CPU settles
            return _Way(self._exact, open_device(self.centers))
        return _Way(self._exact if name == "numpy" else CertifiedScan(name, self.centers))

    def _search(
        self,
        way: "_Way",
        z_BD: Embeddings,
        top: int,
        first: int,
        *,
        float64: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Returns ids [B, top], float64 scores [B, top] and the level that settled each row [B].

        The search begins at level `first`.
        """
        ids = np.full((len(z_BD), top), -1, dtype=np.int64)
        scores = np.full((len(z_BD), top), -np.inf)
        level = np.full(len(z_BD), _NUM_LEVELS - 1)
        open_rows = np.arange(len(z_BD))
        for number, found_by in self._ladder(way, top, float64=float64):
            if number < first:
                continue
            if len(open_rows) == 0:
                break
            part_BD = z_BD if len(open_rows) == len(z_BD) else z_BD[open_rows]
            found = found_by(part_BD)
            if len(part_BD) == len(z_BD) and found.proven.all():  # the ordinary case
                return found.ids, found.scores, np.full(len(z_BD), number)
            settled = open_rows[found.proven]
            ids[settled], scores[settled], level[settled] = (
                found.ids[found.proven],
                found.scores[found.proven],
                number,
            )
            open_rows = open_rows[~found.proven]
        if len(open_rows):
            ids[open_rows], scores[open_rows] = self._in_float64(z_BD[open_rows], top)
        return ids, scores, level

    def _ladder(self, way: "_Way", top: int, *, float64: bool) -> Iterator[tuple[int, "_Finder"]]:
        """Yields what finds answers, each with its level in `ScanCounts`; it is asked for the rows
        that those before left open.
        """
        level = 0
        if way.lister is not None:
            for each in way.lister.rooms:
                room = each * max(top, _ROOM_LEAST)
                yield level, partial(self._shortlisted, top, room, way.lister, float64=float64)
                level = 1
        rounding = way.scan.matmul.rounding
        kept = max(_KEPT_LEAST[rounding.inputs], _KEPT_EACH[rounding.inputs] * top)
        kept *= 2 if rounding.coarse else 1
        if way.lister is None or way.scan is not self._exact:
            yield level, partial(way.scan.find, top, kept)
            yield 1, partial(way.scan.find, top, _WIDER * kept)
        yield 2, partial(self._exact.find, top, _WIDER * kept)

    def _shortlisted(
        self,
        top: int,
        room: int,
        lister: Shortlister,
        z_BD: Embeddings,
        *,
        float64: bool,
    ) -> CertifiedAnswers:
        found = lister.shortlist(z_BD, top, room)
        ids, scores = found.ids[:, :top].copy(), found.scores[:, :top].copy()
        # The scores of a device and of compiled loops are summed in orders of their own.
        (again,) = np.nonzero(found.sure if float64 else found.sure & ~found.clear)
        rows, places = np.nonzero(found.ids[again] >= 0)
        columns = found.ids[again[rows], places]
        if len(again):
            ids[again], scores[again] = ordered(z_BD[again], self.centers, rows, columns, top)
        return CertifiedAnswers(ids, scores, found.sure)

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
    """A scan, and what is asked before it."""

    scan: CertifiedScan
    lister: Shortlister | None = None

    @property
    def name(self) -> str:
        return self.scan.matmul.name if self.lister is None else self.lister.name


_Finder: TypeAlias = Callable[[Embeddings], CertifiedAnswers]
