"""The exact l nearest centers of each embedding, in one total order.

The score is the inner product of the float32 values, computed in float64. Ties, duplicate centers included,
are settled by the lower id, so the answer does not depend on block size, threads or hardware.
"""

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.types import Embeddings, Neighbors

_BLOCK_ENTRIES: Final = 1 << 24  # float32 scores held at once: 64 MiB
_UNIT_ROUNDOFF: Final = 2.0**-24


def nearest_centers(
    embeddings: Embeddings,
    centers: Embeddings,
    top: int = 8,
    threshold: float | None = None,
    mode: Literal["exact"] = "exact",
) -> Neighbors:
    """The `top` centers of highest cosine for each row: ids int32 [N, top], scores float32 [N, top].

    Order: score descending, id ascending, decided on the float64 scores. Where there are fewer than `top`
    centers, or their score is below `threshold`, id is -1 and score -inf.

    Raises InvalidInput for another dimension or values that are not finite, naming the first such row.
    """
    if top < 1:
        raise ConfigInvalid(f"top must be at least 1, got {top}")
    if mode != "exact":
        raise ConfigInvalid(f"unknown mode {mode}", remedy="use exact")
    check_rows(embeddings, "embeddings")
    check_rows(centers, "centers")
    if embeddings.shape[1] != centers.shape[1]:
        raise InvalidInput(
            f"embeddings have dimension {embeddings.shape[1]}, centers {centers.shape[1]}",
            remedy="use the centers of the same model",
        )
    ids = np.full((len(embeddings), top), -1, dtype=np.int32)
    scores = np.full((len(embeddings), top), -np.inf, dtype=np.float32)
    rows_per_block = max(1, _BLOCK_ENTRIES // max(1, len(centers)))
    for start in range(0, len(embeddings), rows_per_block):
        block = slice(start, start + rows_per_block)
        ids[block], scores[block] = _scan(embeddings[block], centers, top, threshold)
    return Neighbors(ids, scores)


def check_rows(rows: NDArray[np.floating], what: str) -> None:
    """Raise InvalidInput unless `rows` is a float32 matrix of finite values."""
    if rows.ndim != 2 or rows.dtype != np.float32:
        raise InvalidInput(f"{what} must be a float32 matrix, got {rows.dtype} {list(rows.shape)}")
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        raise InvalidInput(f"{what} row {int(np.flatnonzero(~finite)[0])} holds NaN or Inf", remedy="remove it")


def _scan(
    z_BD: Embeddings, centers_KD: Embeddings, top: int, threshold: float | None
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """float32 scan, then float64 scores of everything that rounding could have hidden from the top."""
    num_kept = min(top, len(centers_KD))
    scores_BK = z_BD @ centers_KD.T
    # |fp32 dot - exact dot| <= g |z| |c| with g = D u / (1 - D u) for any order of summation (Higham, 3.1).
    growth = z_BD.shape[1] * _UNIT_ROUNDOFF / (1 - z_BD.shape[1] * _UNIT_ROUNDOFF)
    error_B = growth * np.linalg.norm(z_BD, axis=1) * np.linalg.norm(centers_KD, axis=1).max(initial=0.0)
    last_B = np.partition(scores_BK, -num_kept, axis=1)[:, -num_kept]
    candidate_BK = scores_BK >= (last_B - 2 * error_B)[:, None]
    if len(z_BD) > 1 and np.count_nonzero(candidate_BK) * z_BD.shape[1] > _BLOCK_ENTRIES:
        # Very many near-ties: half the rows at a time bound the memory of their float64 scores.
        half = len(z_BD) // 2
        halves = [_scan(part, centers_KD, top, threshold) for part in (z_BD[:half], z_BD[half:])]
        return np.concatenate([ids for ids, _ in halves]), np.concatenate([scores for _, scores in halves])
    rows, columns = np.nonzero(candidate_BK)
    exact = np.einsum("nd,nd->n", z_BD[rows].astype(np.float64), centers_KD[columns].astype(np.float64))
    order = np.lexsort((columns, -exact, rows))
    rows, columns, exact = rows[order], columns[order], exact[order]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    keep = rank < num_kept
    if threshold is not None:
        keep &= exact >= threshold
    ids = np.full((len(z_BD), top), -1, dtype=np.int32)
    scores = np.full((len(z_BD), top), -np.inf, dtype=np.float32)
    ids[rows[keep], rank[keep]] = columns[keep]
    scores[rows[keep], rank[keep]] = exact[keep]
    return ids, scores
