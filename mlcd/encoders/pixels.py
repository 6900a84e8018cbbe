"""Raw pixels as an embedding: the baseline that every learned representation has to beat."""

import hashlib
from typing import Final

import numpy as np

from mlcd.encoders.unit_rows import check_batch, unit_or_zero
from mlcd.images.transform import PreprocessSpec
from mlcd.types import Embeddings, ImageBatch

_SIDE: Final = 16


class PixelsEncoder:
    """The `Encoder` protocol over the 16 x 16 RGB thumbnail: 768 numbers."""

    name = "pixels"
    engine = "numpy"
    precision = "fp32"
    dimension = 3 * _SIDE * _SIDE

    def __init__(self) -> None:
        self.preprocess = PreprocessSpec(resize_shortest=_SIDE, crop=_SIDE)
        self.fingerprint = hashlib.sha256(f"pixels-1 {_SIDE}".encode()).hexdigest()

    def encode(self, images: ImageBatch) -> Embeddings:
        check_batch(images, _SIDE)
        return unit_or_zero(images.reshape(len(images), self.dimension).astype(np.float64))

    def close(self) -> None: ...
