"""The interface of image encoders (pixels to embeddings), which each engine implements."""

from typing import Literal, Protocol, TypeAlias

from mlcd.encoders.unit_rows import MAX_BATCH
from mlcd.images.transform import PreprocessSpec
from mlcd.types import Embeddings, Fingerprint, ImageBatch

# the precision in which an engine computes; int8 needs a graph of `mlcd quantize`
Precision: TypeAlias = Literal["fp32", "bf16", "int8"]

# the engine that runs a model; auto selects the fastest engine of this machine
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
    # the precision; for int8 with a prefix of the graph's digest, because rows depend on the graph
    precision: str

    def encode(self, images: ImageBatch) -> Embeddings:
        """Encodes uint8 [N, 3, crop, crop] to float32 [N, dimension] of unit rows.

        A row of norm 0 is returned as zeros. Raises InvalidInput for a batch of another shape, and
        Unavailable if the engine fails.
        """
        ...

    def close(self) -> None:
        """Frees the engine, after which `encode` of an encoder with an engine raises Unavailable; a
        second call does nothing.
        """
        ...


def job_batch(encoder: Encoder) -> int:
    """Returns the batch size for jobs: the encoder's `job_batch` if it has one, as torch on a GPU
    has, otherwise MAX_BATCH.
    """
    batch: int = getattr(encoder, "job_batch", MAX_BATCH)
    return batch
