"""The exact l nearest centers of each embedding, in one total order, whatever arithmetic finds
them.

The score is the inner product of the float32 values, computed in float64. The answer is the first l
centers by score descending, then id ascending: ties, duplicate centers included, go to the lower
id.

The scan computes products in float32, bfloat16 or eight-bit integers, block by block. Each row has
a threshold t, and entries above it are kept, at most M of them. A row is proven where nothing left
out can belong to its answer. Where inputs are rounded, a shift m, the mean of the centers, is
subtracted from each center c before: x.(c - m) orders the centers of a row x as x.c does, and what
rounding loses grows with |c - m|. In eight bits m is subtracted from x as well, and m.(c - m) added
to the product. Let d = c - m, y = x or x - m, y' and d' their rounded values, a the product, s the
exact score and b the rounding of the output. Then

    s - x.m <= a + b |a| + |y - y'| |d| + |y'| |d - d'| + g |y'| D',

with D' = max |d'|, by Cauchy-Schwarz for the inputs and g = D u / (1 - D u) for the sum (Higham,
Accuracy and Stability, 3.1); `Slack` adds what x.m and m.d lose in float32. Any l centers bound the
l-th best score from below by q, the least of their own: the last labels, or those of largest
product so far. A center whose bound lies below q is not of the answer, so t is the largest a that,
with max |d| and max |d - d'|, keeps the bound below q; it rises as better centers are known. Where
more than M entries exceed it, t becomes the M-th of them. If the bound at a = t lies below the l-th
best float64 score among the kept, the answer is among them. Of these the bounds of each center, and
then float32 scores, leave few for float64. Rows that are not proven go through a wider scan, then a
float32 one, then a float64 one that settles any number of ties.

Shapes: B rows of a batch, K centers, D dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.arithmetics import (
    BLOCK_CENTERS,
    DEVICE,
    TIMED_ROWS,
    TIMED_RUNS,
    MatmulName,
    clock_for,
    fastest_matmuls,
    open_device,
    open_matmul,
)
from mlcd.clustering.candidates import Candidates, first_of_each
from mlcd.clustering.certificate import (
    DOUBLE_MARGIN,
    Norms,
    Slack,
    beyond_reach,
    double_error,
    lowered,
    raised,
)
from mlcd.clustering.exact_scores import (
    exact_scores,
    first_in_order,
    ordered,
    scores_of_each,
    single_scores,
)
from mlcd.clustering.matmul import Matmul, Rounding, ranks
from mlcd.clustering.query_checks import check_query, check_rows
from mlcd.clustering.row_threads import batches, in_threads, on_one_core
from mlcd.clustering.shortlist import Shortlister
from mlcd.errors import ConfigInvalid, InvalidInput, Unavailable
from mlcd.types import Embeddings, Neighbors, ScanCounts

_BATCH_ROWS: Final = 1024
_LEAST_ROWS: Final = 128  # of a thread's batch
_BLOCK_CENTERS: Final = BLOCK_CENTERS
_DOUBLE_ENTRIES: Final = 1 << 22  # float64 scores that a thread holds at once: 32 MiB
# Entries kept for each of the answer, and at least, by whether inputs are rounded: only those
# within the error of the answer, so that room costs little.
_KEPT_EACH: Final = {False: 4, True: 24}
_KEPT_LEAST: Final = {False: 32, True: 64}
_WIDER: Final = 4
_ROOMS: Final = (8, 64)  # of a device's shortlists, for each of the answer
_ROOM_LEAST: Final = 8  # times that
_RAISED_EVERY: Final = 4  # blocks, then 4 times as many, until the threshold is raised again
_OPEN_SHARE: Final = 0.25  # a wider pass costs about half as much again as the first
_WORTH_A_TIMING: Final = 2_500_000_000  # multiplications: 25 ms of two cores
_TIMED_WAYS: Final = 2  # of fastest products, timed with all that the answer takes
_NUM_LEVELS: Final = 4  # those of ScanCounts: proven, wider, float32, float64


def nearest_centers(
    embeddings: Embeddings,
    centers: Embeddings,
    top: int = 8,
    threshold: float | None = None,
    mode: Literal["exact"] = "exact",
    *,
    previous: NDArray[np.integer] | None = None,
) -> Neighbors:
    """Returns the `top` centers of highest cosine for each row: ids int32 [N, top], scores float32
    [N, top].

    The order is score descending, id ascending, decided on the float64 scores. Where there are
    fewer than `top` centers, or their score is below `threshold`, the id is -1 and the score -inf.
    previous: see `CenterScan.nearest`. For several calls with the same centers make one
    `CenterScan`.

    Raises InvalidInput for another dimension or values that are not finite, naming the first such
    row.
    """
    if mode != "exact":
        raise ConfigInvalid(f"unknown mode {mode}", remedy="use exact")
    return CenterScan(centers, matmul="numpy").nearest(
        embeddings, top, threshold, previous=previous
    )


class CenterScan:
    """A set of centers made ready for exact look-ups: checked, measured and rounded once."""

    def __init__(
        self, centers: Embeddings, *, matmul: MatmulName | Literal["auto"] = "auto"
    ) -> None:
        """Checks and prepares the centers.

        matmul: the arithmetic of the scan; auto multiplies in float32 until there is work enough
        to repay a timing of those that this machine has, on the first rows.

        Raises InvalidInput for centers that are not finite, ConfigInvalid where torch or a GPU is
        missing.
        """
        check_rows(centers, "centers")
        self.centers = centers = np.ascontiguousarray(centers)  # libraries read them by address
        self._way = self._exact = _Way.open("numpy", centers)
        self._device: Shortlister | None = None
        self._undecided = matmul == "auto"
        self._work = 0
        if matmul != "auto" and matmul != "numpy":  # noqa: PLR1714  mypy narrows by these alone
            self._use(self._open(matmul))

    @property
    def products(self) -> str:
        """Returns the name of the arithmetic."""
        return self._way.matmul.name if self._device is None else self._device.name

    def nearest(
        self,
        embeddings: Embeddings,
        top: int = 8,
        threshold: float | None = None,
        *,
        previous: NDArray[np.integer] | None = None,
    ) -> Neighbors:
        """Returns what `nearest_centers` returns for these centers.

        previous: int [N, >= top], distinct ids of centers for each row, such as its last
        assignment. Their scores bound those of the answer from below, so that the scan looks at
        less; the answer is the same.
        """
        check_query(embeddings, top, self.centers.shape[1])
        num_wanted = min(top, len(self.centers))
        # a threshold is compared with the scores before they are rounded
        float64 = threshold is not None
        ids, exact, level = self._answer(embeddings, num_wanted, previous, float64=float64)
        if threshold is not None:
            ids = np.where(exact >= threshold, ids, -1)
            exact = np.where(exact >= threshold, exact, -np.inf)
        all_ids = np.full((len(embeddings), top), -1, dtype=np.int32)
        all_scores = np.full((len(embeddings), top), -np.inf, dtype=np.float32)
        all_ids[:, :num_wanted], all_scores[:, :num_wanted] = ids, exact
        counts = np.bincount(level, minlength=_NUM_LEVELS)
        return Neighbors(all_ids, all_scores, ScanCounts(self.products, *counts.tolist()))

    def search(
        self, embeddings: Embeddings, top: int, previous: NDArray[np.integer] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Returns ids [N, top], float64 scores [N, top] and the level of `ScanCounts` that settled
        each row.

        embeddings: such as `check_query` has let pass. top: not more than there are centers.
        """
        return self._answer(embeddings, top, previous, float64=True)

    def _answer(
        self,
        embeddings: Embeddings,
        top: int,
        previous: NDArray[np.integer] | None,
        *,
        float64: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Returns what `search` does. float64: false where scores are wanted in float32 alone."""
        if previous is not None:
            previous = self._checked(previous[:, :top])
        if self._undecided and top:
            self._choose(embeddings, top)
        ids = np.full((len(embeddings), top), -1, dtype=np.int64)
        scores = np.full((len(embeddings), top), -np.inf)
        level = np.zeros(len(embeddings), dtype=np.int64)
        first = 0

        def search(batch: slice) -> None:
            nonlocal first
            seeds = None if previous is None else previous[batch]
            rows = np.ascontiguousarray(embeddings[batch])
            ids[batch], scores[batch], level[batch] = self._search(
                rows, top, seeds, first, float64=float64
            )
            # A first pass that proves little is left out for the next batch: it would cost more
            # than it settles.
            first = int((level[batch] > 0).mean() > _OPEN_SHARE)

        num_rows = len(embeddings) if top else 0
        most = _BATCH_ROWS if self._device is None else self._device.batch_rows
        in_threads(search, batches(num_rows, most=most, least=_LEAST_ROWS))
        return ids, scores, level

    def _choose(self, embeddings: Embeddings, top: int) -> None:
        """Takes the arithmetic that finds the answer of the first rows fastest, proofs and wider
        passes included, once the rows seen have been work enough.
        """
        self._work += len(embeddings) * self.centers.size
        if self._work < _WORTH_A_TIMING or len(embeddings) < TIMED_ROWS:
            return
        self._undecided = False
        names = fastest_matmuls(self.centers)[:_TIMED_WAYS]
        rows = np.ascontiguousarray(embeddings[:TIMED_ROWS])
        self._use(on_one_core(lambda: self._fastest(names, rows, top)))

    def _fastest(
        self, names: Sequence[MatmulName], rows: Embeddings, top: int
    ) -> "_Way | Shortlister":
        """Returns the way that takes the calling thread least time to find the answer."""
        ways: list[_Way | Shortlister] = []
        for name in names:
            with suppress(Unavailable):  # a GPU that has no room
                ways.append(self._exact if name == "numpy" else self._open(name))
        clock = clock_for(names)
        seconds = [np.inf] * len(ways)
        for _ in range(TIMED_RUNS + 1):  # in turn, so that what disturbs one disturbs the others
            for number, way in enumerate(ways):
                self._use(way)
                began = clock()
                self._search(rows, top, None, 0, float64=True)
                seconds[number] = min(seconds[number], clock() - began)
        return ways[seconds.index(min(seconds))]

    def _open(self, name: MatmulName) -> "_Way | Shortlister":
        return open_device(self.centers) if name == DEVICE else _Way.open(name, self.centers)

    def _use(self, way: "_Way | Shortlister") -> None:
        """Searches by this from now on: what a device leaves open, the CPU settles."""
        if isinstance(way, _Way):
            self._way, self._device = way, None
        else:
            self._way, self._device = self._exact, way

    def _checked(self, seeds: NDArray[np.integer]) -> NDArray[np.integer]:
        if seeds.min(initial=0) < 0 or seeds.max(initial=0) >= len(self.centers):
            raise InvalidInput("previous labels name centers that do not exist", remedy="give none")
        if seeds.shape[1] > 1 and (np.diff(np.sort(seeds, axis=1), axis=1) == 0).any():
            raise InvalidInput("previous labels name a center twice in a row", remedy="give none")
        return seeds

    def _search(
        self,
        z_BD: Embeddings,
        top: int,
        seeds: NDArray[np.integer] | None,
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
        for number, found_by in enumerate(self._ladder(top, float64=float64)):
            if number < first:
                continue
            if len(open_rows) == 0:
                break
            part_BD = z_BD if len(open_rows) == len(z_BD) else z_BD[open_rows]
            found = found_by(part_BD, seeds)
            settled = open_rows[found.proven]
            ids[settled], scores[settled], level[settled] = (
                found.ids[found.proven],
                found.scores[found.proven],
                number,
            )
            open_rows = open_rows[~found.proven]
            seeds = found.ids[~found.proven]
            if (seeds < 0).all():  # these would bound nothing
                seeds = None
        if len(open_rows):
            ids[open_rows], scores[open_rows] = self._in_float64(z_BD[open_rows], top)
        return ids, scores, level

    def _ladder(self, top: int, *, float64: bool) -> Iterator["_Level"]:
        """Yields the ways to an answer; each is asked for the rows that those before left open."""
        rounding = self._way.matmul.rounding
        kept = max(_KEPT_LEAST[rounding.inputs], _KEPT_EACH[rounding.inputs] * top)
        kept *= 2 if rounding.coarse else 1
        if self._device is not None:
            for each in _ROOMS:
                room = each * max(top, _ROOM_LEAST)
                yield partial(self._shortlisted, top, room, self._device, float64=float64)
        else:
            yield partial(self._certified, top, kept, self._way)
            yield partial(self._certified, top, _WIDER * kept, self._way)
        yield partial(self._certified, top, _WIDER * kept, self._exact)

    def _shortlisted(
        self,
        top: int,
        room: int,
        device: Shortlister,
        z_BD: Embeddings,
        _: NDArray[np.integer] | None,
        *,
        float64: bool,
    ) -> "_Found":
        found = device.shortlist(z_BD, top, room)
        ids, scores = found.ids[:, :top].copy(), found.scores[:, :top].copy()
        # The scores of a device are summed in an order of its own.
        (again,) = np.nonzero(found.sure if float64 else found.sure & ~found.clear)
        rows, places = np.nonzero(found.ids[again] >= 0)
        columns = found.ids[again[rows], places]
        ids[again], scores[again] = ordered(z_BD[again], self.centers, rows, columns, top)
        return _Found(ids, scores, found.sure)

    def _certified(
        self,
        top: int,
        kept: int,
        way: "_Way",
        z_BD: Embeddings,
        seeds: NDArray[np.integer] | None,
    ) -> "_Found":
        rows = way.matmul.load(z_BD)
        slack = Slack.of(rows, way.matmul.rounding, way.norms)
        candidates = Candidates(len(z_BD), kept)
        known = self._scan(z_BD, rows.data, way.matmul, slack, candidates, top, seeds)
        ids, scores = self._rescored(z_BD, candidates, known, slack, way.matmul.rounding)
        output = way.matmul.rounding.output
        left_out_B = raised(candidates.threshold.astype(np.float64), output) + slack.with_any()
        last_B = scores[:, -1] - slack.offset - DOUBLE_MARGIN
        # With every center kept, nothing is left out: the threshold is -inf, and so is its bound.
        proven_B = (left_out_B < last_B) & (ids[:, -1] >= 0) & slack.holds()
        return _Found(ids, scores, proven_B)

    def _scan(
        self,
        z_BD: Embeddings,
        rows: Any,
        matmul: Matmul,
        slack: Slack,
        candidates: Candidates,
        top: int,
        seeds: NDArray[np.integer] | None,
    ) -> "_Known":
        """Collects the centers whose product is within reach of the answer, and returns some of
        the nearest.
        """
        rounding, slack_B = matmul.rounding, slack.with_any()
        if seeds is not None:
            candidates.pass_over(self._known(z_BD, seeds).beyond(slack, rounding))
        reached_B, next_raise, num_centers = None, _RAISED_EVERY, len(self.centers)
        for number, start in enumerate(range(0, num_centers, _BLOCK_CENTERS)):
            stop = min(start + _BLOCK_CENTERS, num_centers)
            product_BC = matmul.multiply(rows, start, stop)
            if number == 0 and seeds is None and stop >= top:
                reached_B = matmul.reached(product_BC, top)
                least_B = lowered(reached_B.astype(np.float64), rounding.output) - slack_B
                candidates.pass_over(beyond_reach(least_B, slack_B, rounding.output))
            if number == 0 and reached_B is not None and rounding.inputs and stop < num_centers:
                leaders = self._leaders(z_BD, matmul, product_BC, reached_B, top)
                candidates.pass_over(leaders.beyond(slack, rounding))
            elif number == next_raise and rounding.inputs:
                known = self._known(z_BD, candidates.best(top))
                candidates.pass_over(known.beyond(slack, rounding))
                next_raise *= _RAISED_EVERY
            candidates.add(matmul.above(product_BC, candidates.threshold), start)
        return self._known(z_BD, candidates.reaching(reached_B, top))

    def _leaders(
        self,
        z_BD: Embeddings,
        matmul: Matmul,
        product_BC: Any,
        reached_B: NDArray[np.float32],
        top: int,
    ) -> "_Known":
        """Returns centers whose products reach these values, as at least `top` do. Their scores
        bound the answer more closely than their products.
        """
        hits = matmul.above(product_BC, np.nextafter(reached_B, np.float32(-np.inf)))
        ids = first_of_each(hits.rows, hits.columns, len(z_BD), top)
        return self._known(z_BD, np.full((len(z_BD), top), -1) if ids is None else ids)

    def _known(self, z_BD: Embeddings, ids: NDArray[np.integer]) -> "_Known":
        return _Known(ids, scores_of_each(z_BD, self.centers, ids))

    def _rescored(
        self,
        z_BD: Embeddings,
        candidates: Candidates,
        known: "_Known",
        slack: Slack,
        rounding: Rounding,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Returns the first of the known and the candidates by float64 score, as many as are known.

        Only candidates that may be in the answer despite rounding are scored.
        """
        rows, ids, products = candidates.above(known.beyond(slack, rounding))
        least_B = known.least() - DOUBLE_MARGIN
        able = (known.ids[rows] != ids[:, None]).all(axis=1)
        if rounding.inputs:  # the bound of each center
            upper = raised(products.astype(np.float64), rounding.output)
            able &= upper + slack.of_pairs(rows, ids) + slack.offset[rows] >= least_B[rows]
        rows, ids = rows[able], ids[able]
        if rounding.inputs:  # float32 rules most of them out, for less
            able = (
                single_scores(z_BD, self.centers, rows, ids) + slack.single[rows] >= least_B[rows]
            )
            rows, ids = rows[able], ids[able]
        top = known.ids.shape[1]
        slot = top + ranks(rows, len(z_BD))
        all_ids = np.full((len(z_BD), slot.max(initial=top - 1) + 1), -1, dtype=np.int64)
        all_scores = np.full(all_ids.shape, -np.inf)
        all_ids[:, :top], all_scores[:, :top] = known.ids, known.scores
        all_ids[rows, slot] = ids
        all_scores[rows, slot] = exact_scores(z_BD, self.centers, rows, ids)
        return first_in_order(all_ids, all_scores, top)

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
                    @ self.centers[first : first + _BLOCK_CENTERS].astype(np.float64).T
                    for first in range(0, len(self.centers), _BLOCK_CENTERS)
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
    """An arithmetic over the centers, and their lengths in it."""

    matmul: Matmul
    norms: Norms

    @classmethod
    def open(cls, name: MatmulName, centers: Embeddings) -> "_Way":
        matmul = open_matmul(name, centers, _BLOCK_CENTERS)
        return cls(matmul, Norms.of(centers, matmul))


@dataclass(frozen=True)
class _Known:
    """Distinct ids of centers [B, top] and their exact scores; -1 and -inf for none."""

    ids: NDArray[np.integer]
    scores: NDArray[np.float64]

    def least(self) -> NDArray[np.float64]:
        """Returns a bound of the last score of each row's answer from below, [B]."""
        least_B: NDArray[np.float64] = self.scores.min(axis=1)
        return least_B

    def beyond(self, slack: Slack, rounding: Rounding) -> NDArray[np.float32]:
        """Returns a threshold at or below which no product belongs to a center as near as the last
        of these.
        """
        return beyond_reach(self.least() - slack.offset, slack.with_any(), rounding.output)


@dataclass(frozen=True)
class _Found:
    ids: NDArray[np.int64]
    scores: NDArray[np.float64]
    proven: NDArray[np.bool_]


_Level: TypeAlias = Callable[[Embeddings, NDArray[np.integer] | None], _Found]
