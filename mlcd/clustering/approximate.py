"""Finds approximate nearest centers of each embedding by searching only a few cells of centers.

The index is an inverted file. Spherical k-means divides the centers into cells, and a row searches
only its nearest cells. Among the centers of these cells the result is exact, in the order of
`mlcd.clustering.nearest`, so it does not depend on threads or batches. `audit` measures the recall.

Shapes: B rows of a batch, P probes, K centers, D dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.certified_scan import CertifiedScan, Part
from mlcd.clustering.exact_scores import ordered
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import CenterScan, as_neighbors
from mlcd.errors import ConfigInvalid
from mlcd.randomness import hash_counters
from mlcd.types import Embeddings, Neighbors

MIN_CENTERS: Final = 1000
# rows: half select the probes, half measure recall; fewer rows cannot prove a recall of 0.99
MIN_AUDITED_ROWS: Final = 1000
AUDITED_ROWS: Final = 4000
PROBES: Final = (8, 16, 32, 64)
RECALL: Final = 0.99
_ITERATIONS: Final = 10
_CENTERS_PER_CELL: Final = 64  # centers that k-means reads for each cell
_BATCH_ROWS: Final = 4096
_ROOM: Final = 512  # maximum candidates per row; a row with more is scored in float64
_NORMAL_95: Final = 1.959963984540054


@dataclass(frozen=True)
class Cells:
    """A division of centers into cells.

    vectors: unit centers of the cells, float32 [C, D]. of_center: the cell of each center, int32
    [K].
    """

    vectors: Embeddings
    of_center: NDArray[np.int32]


@dataclass(frozen=True)
class RecallAudit:
    """The measured recall of approximate labels.

    recall: share of the exact neighbors that were found for `rows` rows, with its 95 % Wilson
    interval (low, high). A row counts once, however many labels it has, because the labels of one
    row are not independent.
    """

    recall: float
    low: float
    high: float
    rows: int


def divide(centers: Embeddings) -> Cells:
    """Divides the centers into about sqrt(K) cells; a pure function of the centers.

    Raises ConfigInvalid if there are fewer than MIN_CENTERS, because cells would not save time.
    """
    if len(centers) < MIN_CENTERS:
        raise ConfigInvalid(
            f"approximate labels require at least {MIN_CENTERS} centers, got {len(centers)}",
            remedy="use --mode exact",
        )
    num_cells = round(len(centers) ** 0.5)
    chosen = np.argsort(hash_counters(np.arange(len(centers))), kind="stable")[
        : num_cells * _CENTERS_PER_CELL
    ]
    vectors = kmeans([centers[np.sort(chosen)]], num_cells, iterations=_ITERATIONS).centers
    of_center = CenterScan(vectors, matmul="numpy").nearest(centers, 1).ids[:, 0]
    return Cells(vectors, of_center.astype(np.int32))


class ApproximateScan:
    """The centers, and a copy of them sorted into cells."""

    def __init__(self, centers: Embeddings, cells: Cells) -> None:
        self.centers, self.num_cells = centers, len(cells.vectors)
        self._cells = CenterScan(cells.vectors, matmul="numpy")
        self._ids = np.argsort(cells.of_center, kind="stable")
        self._starts = np.searchsorted(cells.of_center[self._ids], np.arange(self.num_cells + 1))
        self._scan = CertifiedScan("numpy", centers, self._ids)

    def nearest(
        self, embeddings: Embeddings, top: int = 8, threshold: float | None = None, *, probes: int
    ) -> Neighbors:
        """Returns the `top` centers of highest cosine in the `probes` cells nearest to each row.

        The result has the form of `mlcd.clustering.nearest.nearest_centers`: ids int32 [N, top],
        scores float32 [N, top], padded with -1 and -inf.
        """
        ids = np.full((len(embeddings), top), -1, dtype=np.int64)
        scores = np.full((len(embeddings), top), -np.inf)
        for start in range(0, len(embeddings), _BATCH_ROWS):
            batch = slice(start, start + _BATCH_ROWS)
            num_probes = min(probes, self.num_cells)
            ids[batch], scores[batch] = self._search(embeddings[batch], top, num_probes)
        return as_neighbors(ids, scores, top, threshold)

    def _search(
        self, z_BD: Embeddings, top: int, probes: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        cells_BP = self._cells.nearest(z_BD, probes).ids
        shortlist = self._scan.shortlist(z_BD, top, _ROOM, self._parts(cells_BP))
        ids, scores = shortlist.ids, shortlist.scores
        for row in np.flatnonzero(~shortlist.sure):
            starts, stops = self._starts[cells_BP[row]], self._starts[cells_BP[row] + 1]
            columns = np.concatenate([np.arange(*ends) for ends in zip(starts, stops, strict=True)])
            one_row, zeros = z_BD[row : row + 1], np.zeros(len(columns), np.int64)
            ids[row], scores[row] = ordered(one_row, self.centers, zeros, self._ids[columns], top)
        return ids, scores

    def _parts(self, cells_BP: NDArray[np.integer]) -> Iterator[Part]:
        """Yields each nonempty cell: the rows that search it, and the range of its centers."""
        order = np.argsort(cells_BP, axis=None, kind="stable")
        bounds = np.searchsorted(cells_BP.ravel()[order], np.arange(self.num_cells + 1))
        for cell in range(self.num_cells):
            rows = order[bounds[cell] : bounds[cell + 1]] // cells_BP.shape[1]
            start, stop = int(self._starts[cell]), int(self._starts[cell + 1])
            if len(rows) and stop > start:
                yield rows, start, stop


def fewest_probes(scan: ApproximateScan, rows: Embeddings, exact: NDArray[np.integer]) -> int:
    """Returns the lowest of PROBES for which the lower bound of the recall reaches RECALL.

    exact: exact ids [n, top]. Raises ConfigInvalid if the highest of PROBES is not enough.
    """
    if wilson_interval(1.0, len(rows))[0] < RECALL:
        raise ConfigInvalid(
            f"{len(rows)} embeddings beside those of the audit are too few to show a recall of"
            f" {RECALL}",
            remedy="use --mode exact, or choose --probes yourself",
        )
    for probes in PROBES:
        audited = audit(scan, rows, exact, probes)
        if audited.low >= RECALL:
            return probes
    cells = min(PROBES[-1], scan.num_cells)
    raise ConfigInvalid(
        f"approximate labels find {audited.recall:.3f} of the exact ones in {cells} of"
        f" {scan.num_cells} cells",
        remedy="use --mode exact, or accept a recall by giving --probes",
    )


def audit(
    scan: ApproximateScan, rows: Embeddings, exact: NDArray[np.integer], probes: int
) -> RecallAudit:
    """Measures the share of the `exact` ids, int [n, top], that an approximate scan of these rows
    finds.
    """
    ids = scan.nearest(rows, exact.shape[1], probes=probes).ids
    hits = (exact[:, :, None] == ids[:, None, :]).any(axis=2)
    recall = float(hits.mean())
    return RecallAudit(recall, *wilson_interval(recall, len(rows)), len(rows))


def wilson_interval(share: float, num: int) -> tuple[float, float]:
    """Returns the 95 % score interval of a share observed in `num` trials (Wilson, JASA 1927)."""
    z2 = _NORMAL_95**2
    center = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = _NORMAL_95 / (1 + z2 / num) * (share * (1 - share) / num + z2 / (4 * num * num)) ** 0.5
    return max(0.0, center - half), min(1.0, center + half)
