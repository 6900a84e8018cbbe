"""Checks batches, and normalizes the rows that engines return."""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.types import Embeddings, ImageBatch

# images per engine call: larger batches were not faster on a CPU and need more memory
MAX_BATCH: Final = 32


def check_batch(images: ImageBatch, crop: int) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (3, crop, crop):
        raise InvalidInput(
            f"expected uint8 images of shape [N, 3, {crop}, {crop}], got {images.dtype}"
            f" {list(images.shape)}"
        )


def encode_in_parts(
    images: ImageBatch,
    run: Callable[[ImageBatch], NDArray[np.floating]],
    *,
    crop: int,
    dimension: int,
) -> Embeddings:
    """Returns unit rows; calls `run` with contiguous batches of at most MAX_BATCH images."""
    check_batch(images, crop)
    rows = np.empty((len(images), dimension), np.float32)
    for start in range(0, len(images), MAX_BATCH):
        part = slice(start, start + MAX_BATCH)
        rows[part] = unit_or_zero(run(np.ascontiguousarray(images[part])))
    return rows


def unit_or_zero(rows: NDArray[np.floating]) -> Embeddings:
    """Returns unit rows; a row whose norm is 0 or not finite becomes zeros."""
    wide = np.asarray(rows, dtype=np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    usable = np.isfinite(norms) & (norms > 0)
    units = np.divide(wide, norms, out=np.zeros_like(wide), where=usable)
    return np.ascontiguousarray(units, dtype=np.float32)
