"""The pairs of rows whose cosine reaches a threshold, exactly, without a comparison of all pairs.

Each row lies in the cell of its nearest pivot. Let x lie in cell a and y in cell b, and let their
angle be at most t. Then

    x.(c_a - c_b) <= |c_a - c_b| sin t,    angle(x, c_b) <= t + the largest angle(y, c_b) of cell b,

the first because y lies on the other side of the plane between the pivots, and the second by the
triangle inequality. A row is compared with the members of those cells alone that both bounds allow.
There a third bound comes first. Let x_h be the head of x, its components along a few orthonormal
directions that hold most of the rows, and |x_r| the length of the rest. Then

    x.y <= x_h.y_h + |x_r| |y_r|.

The products are of float32. What remains is decided in float64.

Shapes: N rows, K pivots, D dimension, H components of a head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.exact_scores import exact_scores
from mlcd.clustering.kmeans import kmeans
from mlcd.progress import Meter
from mlcd.types import Embeddings

_LEAST_ROWS: Final = 4096  # fewer are compared with each other at once
_ITERATIONS: Final = 2
_ROWS_OF_A_PIVOT: Final = 64  # rows that the pivots are found on
_BLOCK_ROWS: Final = 4096
_BLOCK_MEMBERS: Final = 512
_BLOCK_CELLS: Final = 32
_HEAD: Final = 256
_ROUNDS: Final = 2
_SAMPLED_ROWS: Final = 4096
# the share of pairs of a tile above which a product of whole rows is cheaper than single pairs
_FEW: Final = 0.001
_SLACK: Final = 1e-4  # far above what float32 rounds a cosine by


@dataclass(frozen=True)
class ClosePairs:
    """Pairs of rows, first < second, in this order, with their float64 cosines. num_compared: the
    products of whole rows that it took beside those of heads.
    """

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    similarities: NDArray[np.float64]
    num_compared: int


def close_pairs(rows_ND: Embeddings, similarity: float, *, meter: Meter) -> ClosePairs:
    """Returns all pairs of unit rows whose cosine is at least `similarity`, in (0, 1].

    The meter advances by rows, each when the members of its cell are done.
    """
    cells = _Cells.of(rows_ND)
    found, num_compared = [np.zeros((2, 0), np.int64)], 0
    for cell, others in cells.neighbors(math.acos(similarity)):
        members = cells.members(cell)
        for some, start in _tiles(others, members):
            behind = slice(start, members.stop)
            bounds = cells.heads[some] @ cells.heads[behind].T
            near = bounds >= similarity - _SLACK
            if np.count_nonzero(near) > _FEW * near.size:
                near = cells.rows[some] @ cells.rows[behind].T >= similarity - _SLACK
                num_compared += near.size
            left, right = np.nonzero(near)
            one, other = some[left], right + start
            found.append(_close(cells.rows, one, other, similarity))
        meter.advance(members.stop - members.start)
    pairs = cells.order[np.concatenate(found, axis=1)]
    first, second = pairs.min(axis=0), pairs.max(axis=0)
    scores = exact_scores(rows_ND, rows_ND, first, second)
    order = np.lexsort((second, first))
    return ClosePairs(first[order], second[order], scores[order], num_compared)


def _close(
    rows_ND: Embeddings, one: NDArray[np.int64], other: NDArray[np.int64], similarity: float
) -> NDArray[np.int64]:
    """Returns those of the pairs that reach the similarity, [2, n], each once."""
    pairs = np.stack([one, other])[:, one < other]
    close: NDArray[np.int64] = pairs[:, exact_scores(rows_ND, rows_ND, *pairs) >= similarity]
    return close


def _heads(rows_ND: Embeddings) -> Embeddings:
    """Returns [N, H + 1]: the head of each row, and a length that its rest does not exceed."""
    dimension = rows_ND.shape[1]
    sample = rows_ND[:: max(1, len(rows_ND) // _SAMPLED_ROWS)]
    start = np.random.default_rng(0).standard_normal((dimension, min(_HEAD, dimension)))
    basis = start.astype(np.float32)
    for _ in range(_ROUNDS):  # turns the directions to those that hold most
        basis = np.linalg.qr((sample.T @ (sample @ basis)).astype(np.float64))[0].astype(np.float32)
    heads = rows_ND @ basis
    rest = np.einsum("nd,nd->n", rows_ND, rows_ND) - np.einsum("nh,nh->n", heads, heads)
    lengths = np.sqrt(np.maximum(rest, 0) + np.float32(_SLACK / 4))
    return np.concatenate([heads, lengths[:, None]], axis=1)


def _pivots(rows_ND: Embeddings) -> Embeddings:
    """Returns about the root of N centers of a sample; for few rows one row, where there is one."""
    num = math.isqrt(len(rows_ND))
    if len(rows_ND) < _LEAST_ROWS:
        return rows_ND[:1]
    sample = rows_ND[:: max(1, len(rows_ND) // (num * _ROWS_OF_A_PIVOT))]
    distinct = sample[sorted({row.tobytes(): each for each, row in enumerate(sample)}.values())]
    found = kmeans([distinct], min(num, len(distinct)), iterations=_ITERATIONS, seed=0)
    return found.centers


def _tiles(others: NDArray[np.int64], members: slice) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yields rows, and the first member of the cell with which they are compared: the others with
    all members, and each member with those behind it.
    """
    for start in range(0, len(others), _BLOCK_ROWS):
        yield others[start : start + _BLOCK_ROWS], members.start
    for start in range(members.start, members.stop, _BLOCK_MEMBERS):
        yield np.arange(start, min(start + _BLOCK_MEMBERS, members.stop)), start


@dataclass(frozen=True)
class _Cells:
    """All rows in the order of their cells, with their heads.

    order: int64 [N], their numbers. of_row: [N], the cell of each. own: [N], its cosine with the
    pivot. starts: [K + 1], where each cell begins.
    """

    pivots: Embeddings
    rows: Embeddings
    heads: Embeddings
    order: NDArray[np.int64]
    of_row: NDArray[np.int64]
    own: NDArray[np.float32]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, rows_ND: Embeddings) -> "_Cells":
        pivots = _pivots(rows_ND)
        of_row, own = np.empty(len(rows_ND), np.int64), np.empty(len(rows_ND), np.float32)
        for start in range(0, len(rows_ND), _BLOCK_ROWS):
            part = slice(start, start + _BLOCK_ROWS)
            scores = rows_ND[part] @ pivots.T
            of_row[part], own[part] = scores.argmax(axis=1), scores.max(axis=1)
        order = np.argsort(of_row, kind="stable")
        of_row = of_row[order]
        starts = np.searchsorted(of_row, np.arange(len(pivots) + 1))
        rows = rows_ND[order]
        return cls(pivots, rows, _heads(rows), order, of_row, own[order], starts)

    def members(self, cell: int) -> slice:
        return slice(int(self.starts[cell]), int(self.starts[cell + 1]))

    def neighbors(self, angle: float) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yields each cell and the rows of earlier cells that may be within `angle` of a member."""
        for start in range(0, len(self.pivots), _BLOCK_CELLS):
            block = self.pivots[start : start + _BLOCK_CELLS]
            stop = start + len(block)
            scores = self.rows[: self.starts[stop - 1]] @ block.T
            for cell in range(start, stop):
                earlier = slice(int(self.starts[cell]))
                near = self._may_be_near(cell, scores[earlier, cell - start], earlier, angle)
                yield cell, np.flatnonzero(near)

    def _may_be_near(
        self, cell: int, scores: NDArray[np.float32], rows: slice, angle: float
    ) -> NDArray[np.bool_]:
        apart = np.linalg.norm(self.pivots - self.pivots[cell], axis=1)[self.of_row[rows]]
        least = float(self.own[self.members(cell)].min(initial=1.0))
        # an arc cosine near 1 enlarges what float32 has rounded
        reach = math.acos(max(-1.0, least - _SLACK)) + angle
        near: NDArray[np.bool_] = self.own[rows] - scores <= apart * math.sin(angle) + _SLACK
        return near & (scores >= math.cos(min(reach, math.pi)) - _SLACK)
