"""The seam between pixels and embeddings: one narrow protocol, engines behind it."""

from typing import Literal, Protocol, TypeAlias

from mlcd.images.transform import PreprocessSpec
from mlcd.types import Embeddings, Fingerprint, ImageBatch

Precision: TypeAlias = Literal["fp32", "bf16"]
"""What an engine computes in."""

EngineName: TypeAlias = Literal["auto", "openvino", "torch"]
"""What runs a model; auto takes the fastest one that this machine has."""


class Encoder(Protocol):
    """Turns prepared pixels into unit embeddings. Safe to call from several threads."""

    name: str
    """The model's name, for people."""
    fingerprint: Fingerprint
    dimension: int
    preprocess: PreprocessSpec
    """How the pixels must have been prepared."""
    engine: str
    precision: str

    def encode(self, images: ImageBatch) -> Embeddings:
        """uint8 [N, 3, crop, crop] to float32 [N, dimension] of unit rows.

        Raises InvalidInput where the batch has another shape, Unavailable where the engine fails.
        A row that has no direction comes back as zeros.
        """
        ...

    def close(self) -> None:
        """Free the engine; a second call does nothing, and an encoder with an engine then raises Unavailable."""
        ...
