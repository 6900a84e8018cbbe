"""Checks before a scan: it refuses embeddings and centers of another form, or not finite."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.types import Embeddings

_BLOCK_ROWS: Final = 4096  # checked at once


def check_query(embeddings: Embeddings, top: int, dimension: int) -> None:
    """Raises ConfigInvalid or InvalidInput for what no scan of centers of this dimension takes."""
    if top < 1:
        raise ConfigInvalid(f"top must be at least 1, got {top}")
    check_rows(embeddings, "embeddings")
    if embeddings.shape[1] != dimension:
        raise InvalidInput(
            f"embeddings have dimension {embeddings.shape[1]}, centers {dimension}",
            remedy="use the centers of the same model",
        )


def check_rows(rows: NDArray[np.floating], what: str) -> None:
    """Raises InvalidInput unless `rows` is a float32 matrix of finite values."""
    if rows.ndim != 2 or rows.dtype != np.float32:
        raise InvalidInput(f"{what} must be a float32 matrix, got {rows.dtype} {list(rows.shape)}")
    # One block at a time bounds the memory of the check.
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        # NaN and Inf remain in a sum of squares, which costs a fraction of a mask.
        flat = block.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.dot(flat, flat)):
                continue
        finite = np.isfinite(block).all(axis=1)
        if not finite.all():
            row = start + int(np.flatnonzero(~finite)[0])
            raise InvalidInput(f"{what} row {row} holds NaN or Inf", remedy="remove it")
