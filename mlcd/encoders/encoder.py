"""The interface between pixels and embeddings: one narrow protocol, with engines behind it."""

from typing import Literal, Protocol, TypeAlias

from mlcd.encoders.unit_rows import MAX_BATCH
from mlcd.images.transform import PreprocessSpec
from mlcd.types import Embeddings, Fingerprint, ImageBatch

# the precision in which an engine computes; int8: by the graph that `mlcd quantize` has made
Precision: TypeAlias = Literal["fp32", "bf16", "int8"]

# the engine that runs a model; auto takes the fastest one that this machine has
EngineName: TypeAlias = Literal["auto", "openvino", "torch"]


class Encoder(Protocol):
    """An encoder of prepared pixels to unit embeddings. Several threads may call it."""

    # the model's name, for people
    name: str
    fingerprint: Fingerprint
    dimension: int
    # the preprocessing that the pixels must have had
    preprocess: PreprocessSpec
    engine: str
    # the precision, of int8 with the beginning of its graph's digest: other graphs, other rows
    precision: str

    def encode(self, images: ImageBatch) -> Embeddings:
        """Encodes uint8 [N, 3, crop, crop] to float32 [N, dimension] of unit rows.

        Raises InvalidInput where the batch has another shape, Unavailable where the engine fails. A
        row without a direction comes back as zeros.
        """
        ...

    def close(self) -> None:
        """Frees the engine; a second call does nothing. Then an encoder with an engine raises
        Unavailable.
        """
        ...


def job_batch(encoder: Encoder) -> int:
    """Returns how many images a job gives an encoder at once: what it asks for, as torch does on a
    GPU, else MAX_BATCH.
    """
    batch: int = getattr(encoder, "job_batch", MAX_BATCH)
    return batch
