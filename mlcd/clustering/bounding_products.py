"""Products that bound scores from above: of whole vectors, or of their heads.

Shapes: B rows of a batch, K centers, D dimension, H components of a head.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.arithmetics import BLOCK_CENTERS, MatmulName, open_matmul
from mlcd.clustering.certificate import Norms, Slack, has_room, order_error, raised
from mlcd.clustering.certified_scan import CertifiedScan
from mlcd.clustering.heads import Basis, Heads
from mlcd.clustering.matmul import Matmul, lengths
from mlcd.types import Embeddings


@dataclass(frozen=True)
class BoundedRows:
    """Rows in the form in which they are multiplied. slack: what their scores may exceed products
    by, before the output is rounded. order: how far apart two orders of summation in float64 may
    place two scores of a row, and able: where these bounds hold, [B].
    """

    data: Any
    slack: Slack
    order: NDArray[np.float64]
    able: NDArray[np.bool_]


class BoundingProducts(Protocol):
    """Centers in an arithmetic. norms: their lengths in it, and order: their ids, [K], as `matmul`
    has them.
    """

    name: str
    centers: Embeddings
    matmul: Matmul
    norms: Norms
    order: NDArray[np.int64]

    def load(self, rows_BD: Embeddings) -> BoundedRows:
        """Returns the rows in the form in which they are multiplied."""
        ...


class WholeProducts:
    """Centers that are multiplied whole."""

    def __init__(self, scan: CertifiedScan) -> None:
        self.centers, self.matmul, self.norms = scan.centers, scan.matmul.compiled(), scan.norms
        self.order = np.arange(len(scan.centers))
        self.name = scan.matmul.name

    def load(self, rows_BD: Embeddings) -> BoundedRows:
        loaded = self.matmul.load(rows_BD)
        slack = Slack.of(loaded, self.matmul.rounding, self.norms)
        return BoundedRows(loaded.data, slack, slack.order(), slack.holds())


class HeadProducts:
    """The heads of centers, which are short: see `mlcd.clustering.heads`.

    The directions of heads are turned at random within the space they span: else a few components
    would be the largest of every row, and eight bits would be coarse for all others. Centers that
    are near each other are often neighbors in the file. So the first block is a sample of all: it
    has some of most rows' neighborhoods.
    """

    def __init__(
        self, name: MatmulName, centers_KD: Embeddings, basis: Basis, num_components: int
    ) -> None:
        """Makes the heads. name: the arithmetic that they are multiplied in."""
        self.centers = centers_KD
        self._heads = Heads(_turned(basis.vectors_DD[:, :num_components]))
        self.order = _sample_first(len(centers_KD))
        heads_KH = np.empty((len(centers_KD), num_components + 1), dtype=np.float32)
        for start in range(0, len(centers_KD), BLOCK_CENTERS):
            block = slice(start, start + BLOCK_CENTERS)
            heads_KH[block] = self._heads.of(centers_KD[self.order[block]])
        self.matmul = open_matmul(name, heads_KH, BLOCK_CENTERS).compiled()
        self.norms = _by_id(Norms.of(heads_KH, self.matmul), self.order)
        self._longest = float(lengths(centers_KD).max(initial=0.0))
        self.name = f"{self.matmul.name}, heads of {num_components}"

    def load(self, rows_BD: Embeddings) -> BoundedRows:
        loaded = self.matmul.load(self._heads.of(rows_BD))
        slack = Slack.of(loaded, self.matmul.rounding, self.norms)
        length_B = lengths(rows_BD)
        order_B = order_error(length_B, self._longest, rows_BD.shape[1])
        of_row_B = slack.of_row + self._heads.slack * length_B * self._longest + order_B
        able_B = slack.holds() & has_room(length_B, self._longest)
        return BoundedRows(loaded.data, replace(slack, of_row=of_row_B), order_B, able_B)


def upper_bounds(products: BoundingProducts, rows_BD: Embeddings) -> NDArray[np.float64]:
    """Returns what each score does not exceed, [B, K], the centers as `order` has them: for no more
    of them than fill a block.
    """
    matmul, norms, rows = products.matmul, products.norms, products.load(rows_BD)
    stored_BK = matmul.sums(rows.data, 0, len(products.centers)).products()
    bounds_BK = raised(stored_BK.astype(np.float64), matmul.rounding.output)
    bounds_BK += np.outer(rows.slack.error, norms.lengths[products.order])
    bounds_BK += np.outer(rows.slack.length, norms.errors[products.order])
    return bounds_BK + (rows.slack.of_row + rows.slack.offset)[:, None]


def _turned(basis_DH: Embeddings) -> Embeddings:
    """Returns other directions of the same span: a random rotation of these."""
    num = basis_DH.shape[1]
    turn_HH, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((num, num)))
    turned_DH: Embeddings = basis_DH @ turn_HH.astype(np.float32)
    return turned_DH


def _sample_first(num: int) -> NDArray[np.int64]:
    """Returns the ids of so many centers, first as many as fill a block, evenly apart."""
    num_first = min(num, BLOCK_CENTERS)
    first = np.arange(num_first) * num // num_first
    return np.concatenate([first, np.setdiff1d(np.arange(num), first)])


def _by_id(norms: Norms, order_K: NDArray[np.int64]) -> Norms:
    """Returns the norms of centers, which are in this order, in the order of their ids."""
    of_center = np.empty((2, len(order_K)))
    of_center[:, order_K] = norms.lengths, norms.errors
    return replace(norms, lengths=of_center[0], errors=of_center[1])
