"""The exact scores of chosen (row, center) pairs, and the one order of pairs: float64 score
descending, then id.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.cores import available_cores
from mlcd.types import Embeddings

_PAIR_ENTRIES: Final = 1 << 17  # float64 entries scored at once: 1 MiB stays in the cache


def ordered(
    z_BD: Embeddings,
    centers: Embeddings,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    top: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the first `top` of the given (row, center) pairs of each row, as ids and scores [B,
    top].

    The order is by float64 score and then by id; ids are -1 and scores -inf where a row has fewer
    pairs.
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

    The order of summation is always the same, whatever the other pairs are.
    """
    scores = np.empty(len(rows))
    pairs = max(1, _PAIR_ENTRIES // max(1, z_BD.shape[1]))

    def score(start: int) -> None:
        part = slice(start, start + pairs)
        scores[part] = np.einsum(
            "nd,nd->n",
            z_BD[rows[part]].astype(np.float64),
            centers[columns[part]].astype(np.float64),
        )

    starts = range(0, len(rows), pairs)
    if len(starts) <= available_cores():
        for start in starts:
            score(start)
    else:  # numpy releases the interpreter's lock while it gathers, converts and sums
        with ThreadPoolExecutor(available_cores()) as threads:
            list(threads.map(score, starts))
    return scores
