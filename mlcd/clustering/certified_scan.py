"""Scans centers on the CPU in one arithmetic, and proves the answer of each row. The proof is in
`mlcd.clustering.nearest`.

Shapes: B rows of a batch, K centers, C centers of a block, D dimension.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.arithmetics import BLOCK_CENTERS, MatmulName, open_matmul
from mlcd.clustering.certificate import DOUBLE_MARGIN, Norms, Slack, beyond_reach
from mlcd.clustering.exact_scores import exact_scores, first_in_order, scores_of_each
from mlcd.clustering.matmul import entries_above, ranks, reached_by, single_scores
from mlcd.clustering.shortlist import Shortlist
from mlcd.types import Embeddings

_Ids: TypeAlias = NDArray[np.int64]
_Products: TypeAlias = NDArray[np.float32]
# rows (None for all), and the range [start, stop) of centers that they are multiplied by
Part: TypeAlias = tuple[_Ids | None, int, int]

_FRESH: Final = 64  # new candidates per row after which the threshold is raised again


@dataclass(frozen=True)
class _ScoredCenters:
    """Scored centers of each row: ids and exact scores, [B, L], padded with -1 and -inf."""

    ids: _Ids
    scores: NDArray[np.float64]

    def beyond(self, slack: Slack) -> _Products:
        """Returns a threshold [B]: a center whose product is not above it is farther than all of
        these. Scores bound the answer more closely than products do.
        """
        return beyond_reach(self.scores.min(axis=1) - slack.offset, slack.max_error)


class Candidates:
    """The products above their row's threshold, collected block by block.

    threshold: float32 [B]; no omitted product exceeds it, and it only rises. It is inf for a row
    that is abandoned because it has more than `room` candidates.
    """

    def __init__(self, num_rows: int, room: int) -> None:
        self.threshold = np.full(num_rows, -np.inf, np.float32)
        self._room, self._num_fresh = room, 0
        self._parts: list[tuple[_Ids, _Ids, _Products]] = []

    @property
    def many_are_fresh(self) -> bool:
        """Returns whether enough candidates were added to raise the threshold again."""
        return self._num_fresh >= _FRESH * len(self.threshold)

    def add(self, rows: _Ids, ids: _Ids, products: _Products) -> None:
        """Adds pairs of a row and a center with their products, row by row."""
        self._parts.append((rows, ids, products))
        self._num_fresh += len(rows)

    def pairs(self) -> tuple[_Ids, _Ids, _Products]:
        """Returns the rows, in ascending order, the ids and the products of all candidates."""
        if not self._parts:
            return *np.empty((2, 0), np.int64), np.empty(0, np.float32)
        if len(self._parts) > 1:
            rows = np.concatenate([part[0] for part in self._parts])
            order = np.argsort(rows, kind="stable")
            ids = np.concatenate([part[1] for part in self._parts])[order]
            products = np.concatenate([part[2] for part in self._parts])[order]
            self._parts = [(rows[order], ids, products)]
        return self._parts[0]

    def raise_threshold(self, threshold_B: _Products) -> None:
        """Raises the threshold; every product of the answer must exceed the new values."""
        self.threshold, self._num_fresh = np.maximum(self.threshold, threshold_B), 0
        self._drop_below()
        crowded_B = np.bincount(self.pairs()[0], minlength=len(threshold_B)) > self._room
        if crowded_B.any():
            self.threshold[crowded_B] = np.inf
            self._drop_below()

    def _drop_below(self) -> None:
        rows, ids, products = self.pairs()
        above = products > self.threshold[rows]
        self._parts = [(rows[above], ids[above], products[above])]

    def best(self, top: int) -> _Ids:
        """Returns the ids of the `top` largest products of each row, [B, top], padded with -1."""
        rows, _, products = self.pairs()
        places = ranks(rows, len(self.threshold))
        width = max(top, places.max(initial=0) + 1)
        products_BM = np.full((len(self.threshold), width), -np.inf, np.float32)
        products_BM[rows, places] = products
        return self.reaching(np.partition(products_BM, -top, axis=1)[:, -top], top)

    def reaching(self, least_B: _Products, top: int) -> _Ids:
        """Returns the ids of up to `top` products of each row that reach `least_B`, [B, top],
        padded with -1.
        """
        rows, ids, products = self.pairs()
        reach = products >= least_B[rows]
        rows, ids = rows[reach], ids[reach]
        places = ranks(rows, len(least_B))
        chosen = places < top
        ids_BL = np.full((len(least_B), top), -1, np.int64)
        ids_BL[rows[chosen], places[chosen]] = ids[chosen]
        return ids_BL


class CertifiedScan:
    """A scan of centers in one arithmetic."""

    rooms: Final = (128,)
    batch_rows: Final = 1024
    sums_in_order: Final = True

    def __init__(
        self, name: MatmulName, centers: Embeddings, order: NDArray[np.int64] | None = None
    ) -> None:
        """order: ids of the centers in the order of multiplication; None for ascending ids.

        Raises ConfigInvalid if torch is required and not installed.
        """
        self.centers, self.arithmetic, self._order = centers, name, order
        in_order = centers if order is None else centers[order]
        self.matmul = open_matmul(name, in_order, BLOCK_CENTERS)
        self.name, self.norms = self.matmul.name, Norms.of(centers, self.matmul)

    def shortlist(
        self, z_BD: Embeddings, top: int, room: int, parts: Iterable[Part] | None = None
    ) -> Shortlist:
        """Returns the answer of each row.

        room: maximum number of candidates per row; a row with more is not sure. parts: the products
        to compute; None for all.
        """
        rows = self.matmul.load(z_BD)
        slack = Slack.of(rows, self.matmul.rounding, self.norms)
        candidates, best_known = Candidates(len(z_BD), room), None
        for number, part in enumerate(self._all_blocks() if parts is None else parts):
            reached_B = self._collect(candidates, rows.data, slack, part, top)
            if number == 0 and reached_B is not None and self.matmul.rounding.inputs:
                ids = candidates.reaching(reached_B, top)
            elif number > 0:
                best_known = None
                if not candidates.many_are_fresh:
                    continue
                ids = candidates.best(top)
            else:
                continue
            best_known = self._score_known(z_BD, ids)
            candidates.raise_threshold(best_known.beyond(slack))
        if best_known is None:
            best_known = self._score_known(z_BD, candidates.best(top))
            candidates.raise_threshold(best_known.beyond(slack))
        ids, scores = self._first_of(z_BD, best_known, candidates, slack)
        omitted_B = candidates.threshold.astype(np.float64) + slack.max_error
        last_B = scores[:, -1] - slack.offset - DOUBLE_MARGIN
        sure_B = (omitted_B < last_B) | np.isneginf(omitted_B)  # no center is omitted
        sure_B &= slack.holds()
        return Shortlist(ids, scores, sure_B, clear=sure_B)

    def _all_blocks(self) -> Iterator[Part]:
        for start in range(0, len(self.centers), BLOCK_CENTERS):
            yield None, start, min(start + BLOCK_CENTERS, len(self.centers))

    def _collect(
        self, candidates: Candidates, data: Any, slack: Slack, part: Part, top: int
    ) -> _Products | None:
        """Adds the products of a part that are above the threshold.

        Returns a value [B] that at least `top` products of each row reach; None unless all rows are
        new.
        """
        chosen, start, stop = part
        own: Any = slice(None) if chosen is None else chosen
        product_BC = self.matmul.multiply(data if chosen is None else data[chosen], start, stop)
        threshold_B, max_error_B = candidates.threshold[own], slack.max_error[own]
        reached_B = None
        fresh = np.isneginf(threshold_B)
        if stop - start >= top and fresh.any():
            of_fresh = slice(None) if fresh.all() else fresh
            reached_B = reached_by(product_BC[of_fresh], top)
            least_B = reached_B.astype(np.float64) - max_error_B[of_fresh]
            threshold_B[of_fresh] = beyond_reach(least_B, max_error_B[of_fresh])
            candidates.threshold[own] = threshold_B
        rows, columns = entries_above(product_BC, threshold_B)
        ids = start + columns if self._order is None else self._order[start + columns]
        products = product_BC[rows, columns]
        candidates.add(rows if chosen is None else chosen[rows], ids, products)
        return reached_B if chosen is None and fresh.all() else None

    def _score_known(self, z_BD: Embeddings, ids_BL: _Ids) -> _ScoredCenters:
        return _ScoredCenters(ids_BL, scores_of_each(z_BD, self.centers, ids_BL))

    def _first_of(
        self, z_BD: Embeddings, best_known: _ScoredCenters, candidates: Candidates, slack: Slack
    ) -> tuple[_Ids, NDArray[np.float64]]:
        """Returns the first L among the L known centers and the candidates of each row.

        Only candidates that may belong to the answer despite rounding are scored.
        """
        rows, ids, products = candidates.pairs()
        is_new = (best_known.ids[rows] != ids[:, None]).all(axis=1)
        rows, ids, products = rows[is_new], ids[is_new], products[is_new]
        if self.matmul.rounding.inputs:
            least_B = best_known.scores.min(axis=1) - DOUBLE_MARGIN
            bounds = products.astype(np.float64) + slack.of_pairs(rows, ids) + slack.offset[rows]
            may_reach = bounds >= least_B[rows]
            rows, ids = rows[may_reach], ids[may_reach]
            # float32 scores rule most candidates out, and cost less than float64
            scores = single_scores(z_BD, self.centers, rows, ids)
            may_reach = scores + slack.single()[rows] >= least_B[rows]
            rows, ids = rows[may_reach], ids[may_reach]
        top = best_known.ids.shape[1]
        places = top + ranks(rows, len(z_BD))
        ids_BM = np.full((len(z_BD), places.max(initial=top - 1) + 1), -1, np.int64)
        scores_BM = np.full(ids_BM.shape, -np.inf)
        ids_BM[:, :top], scores_BM[:, :top] = best_known.ids, best_known.scores
        ids_BM[rows, places] = ids
        scores_BM[rows, places] = exact_scores(z_BD, self.centers, rows, ids)
        return first_in_order(ids_BM, scores_BM, top)
