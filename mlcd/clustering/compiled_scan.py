"""Scans centers in compiled loops (`mlcd.clustering.compiled_loops`). A product of a row and a
center, in low precision, bounds their exact score.

Each block of products is scanned once, row by row, while it is in the cache. For a row without a
threshold, the centers of its largest products are scored in float64, which sets the threshold.
Centers whose products exceed the threshold are held. They are scored when the buffer is full and
after the last block, and each score may raise the threshold. So few centers are scored, and no
small step waits for the GIL.

The loops sum in their own order. An answer is order-independent if neither its order nor any of its
float32 scores depends on the order of summation. It is sure if no omitted center can belong to it.

Shapes: B rows of a batch, C centers of a block, K centers, D dimension.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.arithmetics import BLOCK_CENTERS
from mlcd.clustering.certificate import DOUBLE_MARGIN, Slack
from mlcd.clustering.certified_scan import CertifiedScan
from mlcd.clustering.compiled_loops import (
    CENTERS_PER_STEP,
    KeptEntries,
    Query,
    collect_candidates,
    mark_sure_rows,
    read_only,
    round_rows,
)
from mlcd.clustering.shortlist import Shortlist
from mlcd.types import Embeddings

# Centers held per row until they are scored: one of _CENTERS_PER_HELD, within limits. The longer
# they wait, the more of them the rising threshold rules out.
_CENTERS_PER_HELD: Final = 32
_LEAST_HELD: Final = 64
_MOST_HELD: Final = 2048
_SPARE: Final = 8  # scored centers kept beyond the answer, for ties
_MAX_ABANDONED: Final = 0.5  # share of rows beyond `room` above which the plain scan is cheaper


class CompiledScan:
    """A scan in compiled loops of the centers [K, D] of a certified scan."""

    rooms: Final = (512,)
    batch_rows: Final = 1024
    sums_in_order: Final = False

    def __init__(self, scan: CertifiedScan) -> None:
        self._centers, self._norms = scan.centers, scan.norms
        self._matmul = scan.matmul
        self.name = f"{self._matmul.name}, compiled"

    def shortlist(self, rows_BD: Embeddings, top: int, room: int) -> Shortlist:
        """Returns the answer of each row.

        room: approximate limit of scored centers per row; a row that exceeds it is marked not sure.
        """
        rows_BD, num_centers = read_only(rows_BD), len(self._centers)
        rows = self._matmul.load(rows_BD, round_rows)
        slack = Slack.of(rows, self._matmul.rounding, self._norms)
        query = self._query(rows_BD, slack, top, room)
        entries = _empty_entries(slack.holds(), num_centers, top + _SPARE)
        for start in range(0, num_centers, BLOCK_CENTERS):
            stop = min(start + BLOCK_CENTERS, num_centers)
            sums = self._matmul.sums(rows.data, start, stop)
            num_left = num_centers - stop
            num_abandoned = collect_candidates(
                tuple(sums), start, num_left, tuple(query), tuple(entries)
            )
            if num_abandoned > _MAX_ABANDONED * len(rows_BD):
                entries.threshold[:] = np.inf
                break
        mark_sure_rows(tuple(query), tuple(entries))
        return Shortlist(
            entries.best_ids, entries.best_scores, entries.sure, entries.order_independent
        )

    def _query(self, rows_BD: Embeddings, slack: Slack, top: int, room: int) -> Query:
        return Query(
            rows=rows_BD,
            centers=read_only(self._centers),
            top=int(top),  # loops are compiled for exactly these types
            max_scored=int(room),
            row_error=slack.row_error,
            length=slack.length,
            error=slack.error,
            offset=slack.offset,
            max_error=slack.max_error,
            center_lengths=self._norms.lengths,
            center_errors=self._norms.errors,
            margin=DOUBLE_MARGIN,
            summation_error=slack.summation_error(),
        )


def _num_held(num_centers: int) -> int:
    return min(max(_LEAST_HELD, num_centers // _CENTERS_PER_HELD), _MOST_HELD)


def _empty_entries(is_bounded_B: NDArray[np.bool_], num_centers: int, num_best: int) -> KeptEntries:
    num, num_held = len(is_bounded_B), _num_held(num_centers)
    block = min(num_centers, BLOCK_CENTERS)
    return KeptEntries(
        ids=np.empty((num, num_held), np.int32),
        products=np.empty((num, num_held), np.float32),
        num=np.zeros(num, np.int64),
        best_ids=np.full((num, num_best), -1),
        best_scores=np.full((num, num_best), -np.inf),
        threshold=np.where(is_bounded_B, np.float32(-np.inf), np.float32(np.inf)),
        num_scored=np.zeros(num, np.int64),
        sure=np.zeros(num, np.bool_),
        order_independent=np.zeros(num, np.bool_),
        waiting=np.empty(CENTERS_PER_STEP, np.int64),
        maxima=np.empty(block, np.float32),
        columns=np.empty(block, np.int64),
    )
