"""Exact nearest-neighbor search: scores every row in float32, block by block, in bounded memory.

Used without an approximate index, and for rows that are not in the index yet. Blocks run on a
thread pool, with BLAS limited to one thread per product: concurrent multi-threaded products block
each other, and a product of a few thousand rows is slower on two threads than on one.
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
    queries: Embeddings,
    rows: Embeddings,
    top: int,
    *,
    allowed_rows: NDArray[np.int64] | None = None,
) -> Neighbors:
    """Returns the `top` rows of highest cosine: ids int64 [Q, top], padded with -1.

    The order is score descending, then id ascending. If scores tie at the cutoff, which of the tied
    rows are returned is undefined. rows: float32 [N, D], in memory or memory-mapped. allowed_rows:
    indices of the rows to search, int64, ascending; None searches all.
    """
    blocks = [
        _scan_block(queries[start : start + _BLOCK_QUERIES], rows, top, allowed_rows)
        for start in range(0, len(queries), _BLOCK_QUERIES)
    ]
    return blocks[0] if len(blocks) == 1 else concatenate_neighbors(blocks, top)


def _scan_block(
    queries: Embeddings, rows: Embeddings, top: int, allowed_rows: NDArray[np.int64] | None
) -> Neighbors:
    num_rows = len(rows) if allowed_rows is None else len(allowed_rows)
    parts = [
        slice(start, min(start + _BLOCK_ROWS, num_rows))
        for start in range(0, num_rows, _BLOCK_ROWS)
    ]
    compare = partial(_compare, queries, rows, top, allowed_rows)
    best = empty_neighbors(len(queries), top)
    with limited_blas():
        for neighbors in map(compare, parts) if len(parts) < 2 else _threads().map(compare, parts):
            best = merge_neighbors(best, neighbors, top)
    return best


def _compare(
    queries: Embeddings,
    rows: Embeddings,
    top: int,
    allowed_rows: NDArray[np.int64] | None,
    part: slice,
) -> Neighbors:
    block = rows[part] if allowed_rows is None else rows[allowed_rows[part]]
    scores = queries @ np.asarray(block).T
    order = _best_columns(scores, min(top, len(block)))
    ids = order + part.start if allowed_rows is None else allowed_rows[order + part.start]
    return Neighbors(ids, np.take_along_axis(scores, order, axis=1))


@cache
def _threads() -> ThreadPoolExecutor:
    """Returns the thread pool shared by all scans of this process."""
    return ThreadPoolExecutor(allowed_threads(), "scan")


def _best_columns(scores: NDArray[np.float32], num: int) -> NDArray[np.int64]:
    if num == scores.shape[1]:
        return np.broadcast_to(np.arange(num), scores.shape)
    return np.argpartition(-scores, num - 1, axis=1)[:, :num]


def empty_neighbors(num_queries: int, top: int) -> Neighbors:
    """Returns padding only: ids -1 and scores -inf, [num_queries, top]."""
    return Neighbors(
        np.full((num_queries, top), -1, dtype=np.int64),
        np.full((num_queries, top), -np.inf, dtype=np.float32),
    )


def merge_neighbors(first: Neighbors, second: Neighbors, top: int) -> Neighbors:
    """Returns the best `top` of two results over disjoint sets of rows."""
    ids = np.concatenate([first.ids, second.ids], axis=1)
    scores = np.concatenate([first.scores, second.scores], axis=1)
    order = np.lexsort((ids, -scores), axis=1)[:, :top]
    return Neighbors(
        np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
    )


def concatenate_neighbors(parts: list[Neighbors], top: int) -> Neighbors:
    """Concatenates the results of several blocks of queries."""
    if not parts:
        return empty_neighbors(0, top)
    return Neighbors(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.scores for part in parts]),
    )
