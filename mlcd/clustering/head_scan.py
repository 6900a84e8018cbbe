"""The scan of heads: centers that a few components rule out are never multiplied whole.

The heads of rows and centers (`mlcd.clustering.heads`) are short vectors whose product bounds the
score from above. An arithmetic multiplies them as it does whole ones, with its bound on what
rounding loses (`mlcd.clustering.nearest`). A center whose product of heads lies far enough below q,
a bound of the l-th best score from below, is not of the answer. Some of the others, those of
largest product, are scored in float32 from time to time, which raises q. In the end all that are
left are scored in float32, and those few that may be in the answer in float64.

Centers that are near each other are often neighbors in the file. So the first block is a sample of
all, every n-th: it has some of most rows' neighborhoods, and q is high from the start. The
directions of heads are turned at random within the space they span: else a few components would be
the largest of every row, and eight bits would be coarse for all others.

A row near which too many centers remain is left to a scan that multiplies whole vectors.

Shapes: B rows of a batch, K centers, D dimension, H components of a head, P pairs.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.arithmetics import BLOCK_CENTERS, open_matmul
from mlcd.clustering.certificate import (
    Norms,
    Slack,
    beyond_reach,
    has_room,
    order_error,
    single_error,
)
from mlcd.clustering.certified_scan import CertifiedScan
from mlcd.clustering.exact_scores import ExactScores
from mlcd.clustering.heads import Basis, Heads
from mlcd.clustering.matmul import lengths, ranks, single_scores
from mlcd.clustering.quick_scores import QuickScores
from mlcd.clustering.shortlist import Shortlist
from mlcd.types import Embeddings

_LEADERS_EACH: Final = 2  # of the first block, for each of the answer
_UPPER: Final = 0.2  # of the range of a row's products in a block: those scored to raise q
_MOST_WAITING: Final = 1 << 20  # pairs, until the threshold is raised again: 24 MiB
_MOST_HELD: Final = 1 << 21  # pairs, of the rows of a batch: 48 MiB
_MOST_LEFT: Final = 0.5  # of the rows, above which a whole product is cheaper for all


class HeadScan:
    """Centers [K, D] and their heads, made ready for products."""

    rooms: Final = (512,)
    batch_rows: Final = 1024

    def __init__(self, whole: CertifiedScan, basis: Basis, num_components: int) -> None:
        """Makes the heads. whole: the scan of whole vectors, whose arithmetic heads have too."""
        self.centers = centers_KD = whole.centers
        self.heads = Heads(_turned(basis.vectors_DD[:, :num_components]))
        self.order_K = _sample_first(len(centers_KD))
        heads_KH = np.empty((len(centers_KD), num_components + 1), dtype=np.float32)
        for start in range(0, len(centers_KD), BLOCK_CENTERS):
            block = slice(start, start + BLOCK_CENTERS)
            heads_KH[block] = self.heads.of(centers_KD[self.order_K[block]])
        self.matmul = open_matmul(whole.name, heads_KH, BLOCK_CENTERS)
        self.norms = Norms.of(heads_KH, self.matmul)
        self.longest = float(lengths(centers_KD).max(initial=0.0))
        self.pair_scores = self.matmul.pair_scores or single_scores
        self.wide = whole.wide
        self.name = f"{self.matmul.name}, heads of {num_components}"

    def shortlist(self, rows_BD: Embeddings, top: int, room: int) -> Shortlist:
        """Returns the answer of each row.

        room: the pairs that are kept for a row, at most; one with more is not sure.
        """
        return _Search(self, rows_BD, top, room).answer()


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a row, in ascending order, and a center: its id, the product of the heads, and the
    float32 score, which is not a number until it is computed. All [P].
    """

    rows: NDArray[np.int64]
    ids: NDArray[np.int64]
    products: NDArray[np.float32]
    scores: NDArray[np.float32]

    def of(self, chosen: NDArray[np.bool_]) -> "_Pairs":
        return _Pairs(
            self.rows[chosen], self.ids[chosen], self.products[chosen], self.scores[chosen]
        )

    def above(self, threshold_B: NDArray[np.float32]) -> "_Pairs":
        return self.of(self.products > threshold_B[self.rows])

    @classmethod
    def joined(cls, parts: list["_Pairs"]) -> "_Pairs":
        rows = np.concatenate([part.rows for part in parts])
        order = np.argsort(rows, kind="stable")
        rest = (
            np.concatenate([getattr(part, name) for part in parts])[order]
            for name in ("ids", "products", "scores")
        )
        return cls(rows[order], *rest)


class _Search:
    """The search for the answers of a batch of rows."""

    def __init__(self, scan: HeadScan, rows_BD: Embeddings, top: int, room: int) -> None:
        self._scan, self._rows_BD, self._top = scan, rows_BD, top
        self._room = min(room, _MOST_HELD // scan.batch_rows)
        self._loaded = scan.matmul.load(scan.heads.of(rows_BD))
        length_B = lengths(rows_BD)
        self._slack = Slack.of(self._loaded, scan.matmul.rounding, scan.norms)
        self._slack_B = self._slack.with_any() + scan.heads.slack * length_B * scan.longest
        self._single_B = single_error(length_B, scan.longest, rows_BD.shape[1])
        self._exact = ExactScores(rows_BD, scan.centers)
        if scan.wide is not None:
            order_B = order_error(length_B, scan.longest, rows_BD.shape[1])
            self._exact = QuickScores(rows_BD, scan.wide, order_B)
        self._left_B = ~(self._slack.holds() & has_room(length_B, scan.longest))
        self._best_BL = np.full((len(rows_BD), top), -np.inf, dtype=np.float32)
        self._threshold_B = np.full(len(rows_BD), -np.inf, dtype=np.float32)
        self._held: list[_Pairs] = []
        self._fresh: list[_Pairs] = []  # since the threshold was raised
        self._num_fresh = 0

    def answer(self) -> Shortlist:
        scan, next_raise = self._scan, 1
        for number, start in enumerate(range(0, len(scan.centers), BLOCK_CENTERS)):
            stop = min(start + BLOCK_CENTERS, len(scan.centers))
            product_BC = scan.matmul.multiply(self._loaded.data, start, stop)
            if number == 0:
                self._keep(self._of_first_block(product_BC, stop))
            else:
                self._keep(self._pairs(product_BC, start))
            if number + 1 == next_raise or self._num_fresh > _MOST_WAITING:
                self._raise()
                next_raise = 2 * (number + 1)
            if self._left_B.mean() > _MOST_LEFT:
                return Shortlist.of_none(len(self._rows_BD), self._top)
        self._raise()
        return self._settled()

    def _pairs(self, product_BC: Any, start: int) -> _Pairs:
        """Returns the pairs of a block whose products exceed the threshold."""
        hits = self._scan.matmul.above(product_BC, self._threshold_B)
        ids, unknown = self._scan.order_K[hits.columns + start], np.float32(np.nan)
        pairs = _Pairs(hits.rows, ids, hits.scores, np.full(len(ids), unknown))
        return pairs.above(self._threshold_B)  # an arithmetic may find a few others

    def _of_first_block(self, product_BC: Any, num: int) -> _Pairs:
        """Returns those of the first block, once the scores of the largest have set a threshold."""
        reached_B = self._scan.matmul.reached(product_BC, min(_LEADERS_EACH * self._top, num))
        self._threshold_B = below_B = np.nextafter(reached_B, np.float32(-np.inf))
        leaders = self._scored(self._pairs(product_BC, 0))
        self._learn(leaders)
        pairs = self._pairs(product_BC, 0)
        # the same pairs, in the same order
        pairs.scores[pairs.products > below_B[pairs.rows]] = leaders.above(self._threshold_B).scores
        return pairs

    def _keep(self, pairs: _Pairs) -> None:
        """Keeps the pairs of a block, unless a row has too many."""
        self._leave(np.bincount(pairs.rows, minlength=len(self._left_B)) > self._room)
        self._fresh.append(pairs.above(self._threshold_B) if self._left_B.any() else pairs)
        self._num_fresh += len(pairs.rows)

    def _leave(self, too_many_B: NDArray[np.bool_]) -> None:
        self._left_B |= too_many_B
        self._threshold_B[self._left_B] = np.inf

    def _raise(self) -> None:
        """Raises the threshold by the scores of the fresh pairs of largest products, and keeps what
        is above it.
        """
        for pairs in self._fresh:
            most_B = np.full(len(self._left_B), -np.inf, dtype=np.float32)
            np.maximum.at(most_B, pairs.rows, pairs.products)
            largest, threshold = most_B[pairs.rows], self._threshold_B[pairs.rows]
            upper = pairs.products >= (1 - _UPPER) * largest + _UPPER * threshold
            upper &= np.isnan(pairs.scores)
            leaders = self._scored(pairs.of(upper))
            pairs.scores[upper] = leaders.scores
            self._learn(leaders)
        kept = [pairs.above(self._threshold_B) for pairs in self._held + self._fresh]
        self._held, self._fresh, self._num_fresh = [_Pairs.joined(kept)], [], 0
        too_many_B = np.bincount(self._held[0].rows, minlength=len(self._left_B)) > self._room
        if too_many_B.any():
            self._leave(too_many_B)
            self._held = [self._held[0].above(self._threshold_B)]

    def _scored(self, pairs: _Pairs) -> _Pairs:
        scan = self._scan
        scores = scan.pair_scores(self._rows_BD, scan.centers, pairs.rows, pairs.ids)
        return replace(pairs, scores=scores)

    def _learn(self, pairs: _Pairs) -> None:
        """Raises the threshold by the scores of these pairs."""
        slot = self._top + ranks(pairs.rows, len(self._best_BL))
        width = slot.max(initial=self._top - 1) + 1
        scores = np.full((len(self._best_BL), width), -np.inf, dtype=np.float32)
        scores[:, : self._top] = self._best_BL
        scores[pairs.rows, slot] = pairs.scores
        self._best_BL = np.partition(scores, -self._top, axis=1)[:, -self._top :]
        least_B = self._best_BL[:, 0].astype(np.float64) - self._single_B - self._slack.offset
        rounding = self._scan.matmul.rounding
        self._threshold_B = beyond_reach(least_B, self._slack_B, rounding.output)
        self._threshold_B[self._left_B] = np.inf

    def _score_all(self) -> _Pairs:
        """Returns all pairs above the threshold, with their scores."""
        pairs = self._held[0]
        unknown = np.isnan(pairs.scores)
        scored = self._scored(pairs.of(unknown))
        pairs.scores[unknown] = scored.scores
        self._learn(scored)
        return pairs

    def _settled(self) -> Shortlist:
        """Returns the answers, by the float64 scores of the pairs that are left."""
        pairs = self._score_all()
        last_B = self._best_BL[:, 0].astype(np.float64)
        pairs = pairs.of(pairs.scores >= (last_B - 2 * self._single_B)[pairs.rows])
        (best,) = np.nonzero(pairs.scores >= last_B[pairs.rows])
        rank = ranks(pairs.rows[best], len(last_B))
        best, rank = best[rank < self._top], rank[rank < self._top]
        ids = np.full(self._best_BL.shape, -1, dtype=np.int64)
        ids[pairs.rows[best], rank] = pairs.ids[best]
        rest = np.ones(len(pairs.rows), dtype=np.bool_)
        rest[best] = False
        ids, scores = self._exact.first_of_all(
            ids, self._exact.of_each(ids), pairs.rows[rest], pairs.ids[rest]
        )
        sure = ids[:, -1] >= 0  # a row that was left has none
        return Shortlist(ids, scores, sure, sure)


def _turned(basis_DH: Embeddings) -> Embeddings:
    """Returns other directions of the same span: a random rotation of these."""
    num = basis_DH.shape[1]
    turn_HH, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((num, num)))
    turned_DH: Embeddings = basis_DH @ turn_HH.astype(np.float32)
    return turned_DH


def _sample_first(num: int) -> NDArray[np.int64]:
    """Returns the ids of so many centers, first those of every n-th, as many as fill a block."""
    ids = np.arange(num)
    step = max(1, num // BLOCK_CENTERS)
    first = (ids % step == 0) & (ids < step * BLOCK_CENTERS)
    return np.concatenate([ids[first], ids[~first]])
