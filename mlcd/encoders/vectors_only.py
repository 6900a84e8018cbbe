"""An embeddings artifact in place of its model, to serve and explore vectors without the model."""

from pathlib import Path
from typing import Final

import numpy as np

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.encoders.unit_rows import check_batch
from mlcd.images.transform import PreprocessSpec
from mlcd.types import Embeddings, ImageBatch

_SIDE: Final = 8


class VectorsOnlyEncoder:
    """The `Encoder` protocol with the space of an embeddings artifact. It embeds no image: every
    row is 0.
    """

    engine = "numpy"
    precision = "fp32"

    def __init__(self, path: Path) -> None:
        embeddings = EmbeddingsArtifact.open(path)
        model = embeddings.artifact.summary.get("model", path.name)
        self.name = f"{model} (vectors only)"
        self.fingerprint, self.dimension = embeddings.fingerprint, embeddings.dimension
        self.preprocess = PreprocessSpec(resize_shortest=_SIDE, crop=_SIDE)

    def encode(self, images: ImageBatch) -> Embeddings:
        check_batch(images, _SIDE)
        return np.zeros((len(images), self.dimension), np.float32)

    def close(self) -> None: ...
