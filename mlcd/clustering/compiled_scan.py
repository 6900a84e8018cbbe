"""The compiled scan: the answers of rows by products that bound their scores, in loops of machine
code (`mlcd.clustering.compiled_loops`).

Each block of products is looked through once, row by row, while it is in the cache. Where nothing
is known of a row yet, its largest products are scored in float64, which sets a threshold. Entries
above it are held, and scored where they are many and in the end; each score may raise the
threshold. So few are scored, and no small step waits for another thread at Python's lock.

The loops sum in an order of their own. An answer is clear where neither its order nor any of its
scores in float32 depends on that, and sure where no center that was left out can belong to it.

Shapes: B rows of a batch, C centers of a block, K centers, D dimension, S best known.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.arithmetics import BLOCK_CENTERS
from mlcd.clustering.certificate import DOUBLE_MARGIN, Slack
from mlcd.clustering.certified_scan import CertifiedScan
from mlcd.clustering.compiled_loops import (
    AT_ONCE,
    KeptEntries,
    Query,
    keep,
    read_only,
    round_rows,
    settle,
)
from mlcd.clustering.shortlist import Shortlist
from mlcd.types import Embeddings

# Entries of a row that are held until they are scored: one of so many centers, and at least and at
# most. Those that wait longest are ruled out by most.
_CENTERS_EACH: Final = 32
_LEAST_HELD: Final = 64
_MOST_HELD: Final = 2048
_SPARE: Final = 8  # centers known beyond the answer, for ties
_MOST_LEFT: Final = 0.5  # of the rows, above which the plain scan is cheaper for all


class CompiledScan:
    """The centers [K, D] of a certified scan, looked through in compiled loops."""

    rooms: Final = (512,)
    batch_rows: Final = 1024
    sums_in_order: Final = False

    def __init__(self, scan: CertifiedScan) -> None:
        self._centers, self._norms = scan.centers, scan.norms
        self._matmul = scan.matmul
        self.name = f"{self._matmul.name}, compiled"

    def shortlist(self, rows_BD: Embeddings, top: int, room: int) -> Shortlist:
        """Returns the answer of each row.

        room: the centers that are scored for a row, about; one with more is not sure.
        """
        rows_BD, num_centers = read_only(rows_BD), len(self._centers)
        rows = self._matmul.load(rows_BD, round_rows)
        slack = Slack.of(rows, self._matmul.rounding, self._norms)
        query = self._query(rows_BD, slack, top, room)
        kept = _nothing_kept(slack.holds(), num_centers, top + _SPARE)
        for start in range(0, num_centers, BLOCK_CENTERS):
            stop = min(start + BLOCK_CENTERS, num_centers)
            sums = self._matmul.sums(rows.data, start, stop)
            num_left = num_centers - stop
            num_given_up = keep(tuple(sums), start, num_left, tuple(query), tuple(kept))
            if num_given_up > _MOST_LEFT * len(rows_BD):
                kept.threshold[:] = np.inf
                break
        settle(tuple(query), tuple(kept))
        return Shortlist(kept.best_ids, kept.best_scores, kept.sure, kept.clear)

    def _query(self, rows_BD: Embeddings, slack: Slack, top: int, room: int) -> Query:
        return Query(
            rows=rows_BD,
            centers=read_only(self._centers),
            top=int(top),  # loops are compiled for these types alone
            most=int(room),
            of_row=slack.of_row,
            length=slack.length,
            error=slack.error,
            offset=slack.offset,
            with_any=slack.with_any,
            center_lengths=self._norms.lengths,
            center_errors=self._norms.errors,
            margin=DOUBLE_MARGIN,
            order=slack.order(),
        )


def _num_held(num_centers: int) -> int:
    return min(max(_LEAST_HELD, num_centers // _CENTERS_EACH), _MOST_HELD)


def _nothing_kept(able_B: NDArray[np.bool_], num_centers: int, num_best: int) -> KeptEntries:
    num, num_held = len(able_B), _num_held(num_centers)
    block = min(num_centers, BLOCK_CENTERS)
    return KeptEntries(
        ids=np.empty((num, num_held), np.int32),
        products=np.empty((num, num_held), np.float32),
        num=np.zeros(num, np.int64),
        best_ids=np.full((num, num_best), -1),
        best_scores=np.full((num, num_best), -np.inf),
        threshold=np.where(able_B, np.float32(-np.inf), np.float32(np.inf)),
        num_scored=np.zeros(num, np.int64),
        sure=np.zeros(num, np.bool_),
        clear=np.zeros(num, np.bool_),
        waiting=np.empty(AT_ONCE, np.int64),
        maxima=np.empty(block, np.float32),
        columns=np.empty(block, np.int64),
    )
