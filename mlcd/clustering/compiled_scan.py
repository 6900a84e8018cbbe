"""The compiled scan: the answers of rows by products that bound their scores, in loops of machine
code (`mlcd.clustering.compiled_loops`).

Each block of products is looked through once, row by row, while it is in the cache. Where nothing
is known of a row yet, its largest products are scored in float64, which sets a threshold. Entries
above it are held, and scored where they are many and in the end; each score may raise the
threshold. So few are scored, whether products are of whole vectors or of heads, and no small step
waits for another thread at Python's lock.

The loops sum in an order of their own. An answer is clear where neither its order nor any of its
scores in float32 depends on that, and sure where no center that was left out can belong to it.

Shapes: B rows of a batch, C centers of a block, K centers, D dimension, S best known.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.arithmetics import BLOCK_CENTERS
from mlcd.clustering.bounding_products import (
    BoundedRows,
    BoundingProducts,
    HeadProducts,
    WholeProducts,
)
from mlcd.clustering.certificate import DOUBLE_MARGIN
from mlcd.clustering.certified_scan import CertifiedScan
from mlcd.clustering.compiled_loops import AT_ONCE, KeptEntries, Query, keep, read_only, settle
from mlcd.clustering.head_choice import promising_components
from mlcd.clustering.heads import Basis
from mlcd.clustering.matmul import lengths
from mlcd.clustering.shortlist import Shortlist
from mlcd.types import Embeddings

# Entries of a row that are held until they are scored: one of so many centers, and at least and at
# most. Those that wait longest are ruled out by most.
_CENTERS_EACH: Final = 32
_LEAST_HELD: Final = 64
_MOST_HELD: Final = 2048
_SPARE: Final = 8  # centers known beyond the answer, for ties
_HEADS_LEAST: Final = 128  # components of vectors, below which a product costs little
_LONGEST: Final = 2.0**40  # centers of which a basis is looked for, so that float32 holds squares
_MOST_LEFT: Final = 0.5  # of the rows, above which the plain scan is cheaper for all


class CompiledScan:
    """Centers [K, D], made ready for products that bound scores."""

    rooms: Final = (512,)
    batch_rows: Final = 1024

    def __init__(self, products: BoundingProducts) -> None:
        self._products = products
        self.name = f"{products.name}, compiled"

    def shortlist(self, rows_BD: Embeddings, top: int, room: int) -> Shortlist:
        """Returns the answer of each row.

        room: the centers that are scored for a row, about; one with more is not sure.
        """
        products, centers, rows_BD = self._products, self._products.centers, read_only(rows_BD)
        rows = products.load(rows_BD)
        query = self._query(rows_BD, rows, top, room)
        kept = _nothing_kept(rows.able, len(centers), top + _SPARE)
        for start in range(0, len(centers), BLOCK_CENTERS):
            stop = min(start + BLOCK_CENTERS, len(centers))
            sums = products.matmul.sums(rows.data, start, stop)
            ids_C = products.order[start:stop]
            num_left = len(centers) - stop
            num_given_up = keep(tuple(sums), ids_C, num_left, tuple(query), tuple(kept))
            if num_given_up > _MOST_LEFT * len(rows_BD):
                kept.threshold[:] = np.inf
                break
        settle(tuple(query), tuple(kept))
        return Shortlist(kept.best_ids, kept.best_scores, kept.sure, kept.clear)

    def _query(self, rows_BD: Embeddings, rows: BoundedRows, top: int, room: int) -> Query:
        products, slack = self._products, rows.slack
        return Query(
            rows=rows_BD,
            centers=read_only(products.centers),
            top=int(top),  # loops are compiled for these types alone
            most=int(room),
            of_row=slack.of_row,
            length=slack.length,
            error=slack.error,
            offset=slack.offset,
            with_any=slack.with_any,
            center_lengths=products.norms.lengths,
            center_errors=products.norms.errors,
            output=products.matmul.rounding.output,
            margin=DOUBLE_MARGIN,
            order=rows.order,
        )


def of_whole_vectors(scan: CertifiedScan) -> CompiledScan:
    """Returns a compiled scan of the products of whole vectors."""
    return CompiledScan(WholeProducts(scan))


def compiled_scans(
    scans: Sequence[CertifiedScan], rows_BD: Embeddings, scores_BL: NDArray[np.float64]
) -> Iterator[tuple[CertifiedScan, CompiledScan]]:
    """Yields each scan with a compiled one of its products, and the first with one of heads where
    these promise to be faster on such rows.

    scores_BL: the scores of each row's answer.
    """
    for each in scans:
        yield each, of_whole_vectors(each)
    scan, centers = scans[0], scans[0].centers
    if centers.shape[1] >= _HEADS_LEAST and float(lengths(centers).max(initial=0.0)) <= _LONGEST:
        basis = Basis(centers)
        num_held = _num_held(len(centers))
        num = promising_components(scan, basis, rows_BD, scores_BL, num_held)
        if num is not None:
            yield scan, CompiledScan(HeadProducts(scan.name, centers, basis, num))


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
