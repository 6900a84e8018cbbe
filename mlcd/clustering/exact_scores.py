"""Computes exact scores of (row, center) pairs and sorts pairs by float64 score descending, then
by id ascending.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.matmul import pairs_at_once
from mlcd.types import Embeddings

# Components per einsum: it splits longer sums at places that depend on the number of pairs.
_COMPONENTS: Final = 4096


def ordered(
    z_BD: Embeddings,
    centers: Embeddings,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    top: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the first `top` of each row's (row, center) pairs, as ids and scores [B, top].

    The order is by float64 score descending, then by id ascending. A row with fewer pairs is padded
    with -1 and -inf.
    """
    exact = exact_scores(z_BD, centers, rows, columns)
    order = np.lexsort((columns, -exact, rows))
    rows, columns, exact = rows[order], columns[order], exact[order]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    keep = rank < top
    ids = np.full((len(z_BD), top), -1, dtype=np.int64)
    scores = np.full((len(z_BD), top), -np.inf)
    ids[rows[keep], rank[keep]], scores[rows[keep], rank[keep]] = columns[keep], exact[keep]
    return ids, scores


def exact_scores(
    z_BD: Embeddings, centers: Embeddings, rows: NDArray[np.int64], columns: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Returns the float64 score of each (row, center) pair.

    The order of summation does not depend on the other pairs.
    """
    scores, at_once = np.empty(len(rows)), pairs_at_once(z_BD.shape[1])
    # reused memory: new pages for every part would cost more than the sums
    shape = (min(at_once, len(rows)), z_BD.shape[1])
    as_read, of_centers, of_rows = (np.empty(shape, t) for t in (np.float32, float, float))
    for start in range(0, len(rows), at_once):
        part = slice(start, min(start + at_once, len(rows)))
        num = part.stop - part.start
        for source, index, exact in ((centers, columns, of_centers), (z_BD, rows, of_rows)):
            np.take(source, index[part], axis=0, out=as_read[:num], mode="clip")
            np.copyto(exact[:num], as_read[:num])
        _sum_products("nd,nd->n", of_rows[:num], of_centers[:num], scores[part])
    return scores


def scores_of_each(
    z_BD: Embeddings, centers: Embeddings, ids_BM: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Returns the exact score of each row and each of its centers, [B, M]; -inf for an id of -1."""
    scores_BM = np.empty(ids_BM.shape)
    num_rows = max(1, pairs_at_once(z_BD.shape[1]) // max(1, ids_BM.shape[1]))
    shape = (num_rows, ids_BM.shape[1], z_BD.shape[1])
    as_read, of_centers = np.empty(shape, np.float32), np.empty(shape)
    of_rows = np.empty((num_rows, z_BD.shape[1]))
    for start in range(0, len(z_BD), num_rows):
        part = slice(start, min(start + num_rows, len(z_BD)))
        num = part.stop - part.start
        np.take(centers, ids_BM[part], axis=0, out=as_read[:num], mode="clip")
        np.copyto(of_centers[:num], as_read[:num])
        np.copyto(of_rows[:num], z_BD[part])
        _sum_products("bmd,bd->bm", of_centers[:num], of_rows[:num], scores_BM[part])
    scores_BM[ids_BM < 0] = -np.inf
    return scores_BM


def _sum_products(
    subscripts: str,
    first: NDArray[np.float64],
    second: NDArray[np.float64],
    out: NDArray[np.float64],
) -> None:
    """Sums products over the last axis into `out`, in the same order for every shape."""
    np.einsum(subscripts, first[..., :_COMPONENTS], second[..., :_COMPONENTS], out=out)
    for start in range(_COMPONENTS, first.shape[-1], _COMPONENTS):
        part = slice(start, start + _COMPONENTS)
        out += np.einsum(subscripts, first[..., part], second[..., part])


def first_in_order(
    ids_BM: NDArray[np.int64], scores_BM: NDArray[np.float64], top: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns each row's first `top` candidates, by score descending, then by id ascending."""
    order = np.lexsort((ids_BM, -scores_BM), axis=1)[:, :top]
    return np.take_along_axis(ids_BM, order, axis=1), np.take_along_axis(scores_BM, order, axis=1)
