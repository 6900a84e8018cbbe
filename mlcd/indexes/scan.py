"""The nearest rows of a matrix by computing every score: in float32, block by block, in bounded
memory.

It serves where an approximate index is not wanted, and for the rows that no index holds yet.
Threads share the blocks, and each product has one: the threads of several products at a time wait
for each other, and a product of a few thousand rows takes longer on two than on one.
Shapes: Q queries, N rows, D dimension.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.row_threads import allowed_threads, limited_blas
from mlcd.types import Embeddings, Neighbors

_BLOCK_ROWS: Final = 16_384
_BLOCK_QUERIES: Final = 256


def scan(
    queries: Embeddings, rows: Embeddings, top: int, *, numbers: NDArray[np.int64] | None = None
) -> Neighbors:
    """Returns the `top` rows of highest cosine: ids int64 [Q, top], -1 where there are fewer.

    The order is score descending, id ascending. rows: float32 [N, D], mapped from disk or in
    memory. numbers: int64, ascending, the rows that may be found. Which of several equal scores at
    the end of a list are kept is not defined.
    """
    blocks = [
        _scan_block(queries[start : start + _BLOCK_QUERIES], rows, top, numbers)
        for start in range(0, len(queries), _BLOCK_QUERIES)
    ]
    return blocks[0] if len(blocks) == 1 else concatenate_neighbors(blocks, top)


def _scan_block(
    queries: Embeddings, rows: Embeddings, top: int, numbers: NDArray[np.int64] | None
) -> Neighbors:
    num_rows = len(rows) if numbers is None else len(numbers)
    parts = [
        slice(start, min(start + _BLOCK_ROWS, num_rows))
        for start in range(0, num_rows, _BLOCK_ROWS)
    ]
    compare = partial(_compare, queries, rows, top, numbers)
    best = nothing(len(queries), top)
    with limited_blas():
        for neighbors in map(compare, parts) if len(parts) < 2 else _threads().map(compare, parts):
            best = merge_neighbors(best, neighbors, top)
    return best


def _compare(
    queries: Embeddings,
    rows: Embeddings,
    top: int,
    numbers: NDArray[np.int64] | None,
    part: slice,
) -> Neighbors:
    block = rows[part] if numbers is None else rows[numbers[part]]
    scores = queries @ np.asarray(block).T
    order = _best_columns(scores, min(top, len(block)))
    ids = order + part.start if numbers is None else numbers[order + part.start]
    return Neighbors(ids, np.take_along_axis(scores, order, axis=1))


@cache
def _threads() -> ThreadPoolExecutor:
    """Returns the threads that all scans of this process share."""
    return ThreadPoolExecutor(allowed_threads(), "scan")


def _best_columns(scores: NDArray[np.float32], num: int) -> NDArray[np.int64]:
    if num == scores.shape[1]:
        return np.broadcast_to(np.arange(num), scores.shape)
    return np.argpartition(-scores, num - 1, axis=1)[:, :num]


def nothing(num_queries: int, top: int) -> Neighbors:
    return Neighbors(
        np.full((num_queries, top), -1, dtype=np.int64),
        np.full((num_queries, top), -np.inf, dtype=np.float32),
    )


def merge_neighbors(first: Neighbors, second: Neighbors, top: int) -> Neighbors:
    """Returns the best `top` of two answers over different rows."""
    ids = np.concatenate([first.ids, second.ids], axis=1)
    scores = np.concatenate([first.scores, second.scores], axis=1)
    order = np.lexsort((ids, -scores), axis=1)[:, :top]
    return Neighbors(
        np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
    )


def concatenate_neighbors(parts: list[Neighbors], top: int) -> Neighbors:
    """Joins the answers to several blocks of queries into one."""
    if not parts:
        return nothing(0, top)
    return Neighbors(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.scores for part in parts]),
    )
