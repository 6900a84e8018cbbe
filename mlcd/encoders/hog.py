"""Histograms of oriented gradients: a classical descriptor for when no pretrained encoder is
available (Dalal and Triggs, CVPR 2005; computed by scikit-image).
"""

import hashlib
from typing import Final

import numpy as np
from skimage.feature import hog

from mlcd.encoders.unit_rows import check_batch, unit_or_zero
from mlcd.images.transform import PreprocessSpec
from mlcd.types import Embeddings, ImageBatch

_SIDE: Final = 64
_PARAMETERS: Final = {
    "orientations": 9,
    "pixels_per_cell": (8, 8),
    "cells_per_block": (2, 2),
    "block_norm": "L2-Hys",
}
_LUMA: Final = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, as Pillow's mode L


class HogEncoder:
    """The `Encoder` protocol over scikit-image's hog of the gray 64 x 64 image: 1764 numbers."""

    name = "hog"
    engine = "scikit-image"
    precision = "fp32"
    dimension = 1764

    def __init__(self) -> None:
        self.preprocess = PreprocessSpec(resize_shortest=_SIDE, crop=_SIDE)
        self.fingerprint = hashlib.sha256(
            f"hog-1 {sorted(_PARAMETERS.items())} {_SIDE}".encode()
        ).hexdigest()

    def encode(self, images: ImageBatch) -> Embeddings:
        check_batch(images, _SIDE)
        if len(images) == 0:
            return np.zeros((0, self.dimension), np.float32)
        gray = np.tensordot(images.astype(np.float64) / 255.0, _LUMA, axes=([1], [0]))
        return unit_or_zero(np.stack([hog(image, **_PARAMETERS) for image in gray]))

    def close(self) -> None: ...
