"""What every engine checks about a batch and does to its output."""

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.types import Embeddings, ImageBatch


def check_batch(images: ImageBatch, crop: int) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (3, crop, crop):
        raise InvalidInput(
            f"expected uint8 images of shape [N, 3, {crop}, {crop}], got {images.dtype} {list(images.shape)}"
        )


def unit_or_zero(rows: NDArray[np.floating]) -> Embeddings:
    """Unit rows; zeros where a row has no direction (norm 0 or not finite)."""
    wide = np.asarray(rows, dtype=np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    usable = np.isfinite(norms) & (norms > 0)
    units = np.divide(wide, norms, out=np.zeros_like(wide), where=usable)
    return np.ascontiguousarray(units, dtype=np.float32)
