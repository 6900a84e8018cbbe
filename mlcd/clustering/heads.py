"""The heads of vectors: their components along a few main directions, and the length of the
remainder. The inner product of two heads bounds that of their vectors from above.

Let the columns of H be orthonormal but for E = H'H - I, Q the orthonormal matrix nearest to H, and
y, w the heads H'x, H'c as computed in float32. A sum of D products is off by at most g = D u / (1 -
D u) of its length (Higham, Accuracy and Stability, 3.1), and |H - Q| <= |E|, so

    |y - Q'x| <= h |x|  with  h = g sqrt((columns of H) (1 + |E|)) + |E|.

With the tails r_x, r_c that Q leaves out, by Cauchy-Schwarz,

    x.c = (Q'x).(Q'c) + r_x.r_c <= y.w + |r_x| |r_c| + (2 h + h^2) |x| |c|,
    |r|^2 = |x|^2 - |Q'x|^2 <= |x|^2 - |y|^2 + 2 h (1 + h) |x|^2.

Shapes: N rows, B rows of a part, D dimension, H components of a head.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.matmul import inner_products
from mlcd.types import Embeddings

_ROUNDS: Final = 2
_ROWS_AT_ONCE: Final = 4096
_ROUNDOFF: Final = 2.0**-24
_TINY: Final = 2.0**-120  # squares of float32 below this lose digits


def main_directions(sample: Embeddings, num: int) -> Embeddings:
    """Returns up to `num` orthonormal directions that carry most of the sample, [D, H]."""
    start = np.random.default_rng(0).standard_normal((sample.shape[1], num))
    basis = start.astype(np.float32)
    for _ in range(_ROUNDS):  # subspace iteration toward the main directions
        basis = np.linalg.qr((sample.T @ (sample @ basis)).astype(np.float64))[0].astype(np.float32)
    return basis


class Heads:
    """The heads along given directions, the columns of `basis` [D, H].

    slack: how far the product of two heads may lie below that of their vectors x and c, as a share
    of |x| |c|.
    """

    def __init__(self, basis_DH: Embeddings) -> None:
        self.basis = np.ascontiguousarray(basis_DH)
        dimension, num = basis_DH.shape
        exact = self.basis.astype(np.float64)
        skew = float(np.linalg.norm(exact.T @ exact - np.eye(num)))
        self._growth = growth = dimension * _ROUNDOFF / (1 - dimension * _ROUNDOFF)
        off = growth * (num * (1 + skew)) ** 0.5 + skew
        self.slack = 2 * off + off**2
        # share of |x|^2; includes float32 errors of both sums of squares and of a few steps
        self._tail_slack = 2 * off * (1 + off) + 2 * growth * (1 + off) ** 2 + 8 * _ROUNDOFF

    def of(self, rows_ND: Embeddings) -> Embeddings:
        """Returns [N, H + 1] float32: the head of each row, and an upper bound of the length of its
        tail.
        """
        heads = np.empty((len(rows_ND), self.basis.shape[1] + 1), dtype=np.float32)
        for start in range(0, len(rows_ND), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            heads[part, :-1] = rows_ND[part] @ self.basis
            heads[part, -1] = self._tails(rows_ND[part], heads[part, :-1])
        return heads

    def _tails(self, rows_BD: Embeddings, heads_BH: Embeddings) -> NDArray[np.float32]:
        with np.errstate(over="ignore", invalid="ignore"):  # rows whose squares overflow float32
            whole_B = inner_products(rows_BD, rows_BD).astype(np.float64) / (1 - self._growth)
            squares_B = whole_B * (1 + self._tail_slack) - inner_products(heads_BH, heads_BH)
            tails_B = np.sqrt(np.maximum(squares_B + _TINY, 0)).astype(np.float32)
            raised_B: NDArray[np.float32] = np.nextafter(tails_B, np.float32(np.inf))
            return raised_B
