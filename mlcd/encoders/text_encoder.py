"""The interface between token ids and embeddings, beside that of images."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.models.text_part import TextSettings
from mlcd.models.tokenizer import Tokenizer
from mlcd.types import Embeddings, Fingerprint, TokenBatch


@dataclass(frozen=True)
class Calibration:
    """The numbers by which a model turns the cosine of an image and a text into a probability.

    scale: the factor of cosines, exp(logit_scale) of the checkpoint. bias: that of SigLIP, which
    judges each pair alone: sigmoid(scale * cosine + bias). With None an image's texts compete:
    softmax over scale * cosine.
    """

    scale: float
    bias: float | None = None

    @classmethod
    def of(cls, settings: TextSettings) -> "Calibration":
        return cls(math.exp(settings.logit_scale), settings.logit_bias)

    def probabilities(self, cosines: NDArray[np.floating]) -> NDArray[np.float32]:
        """Returns the probability of each text for each image: [N, C] to [N, C]."""
        logits = self.scale * cosines.astype(np.float64)
        if self.bias is not None:
            # Written so that no exponential overflows.
            alone: NDArray[np.float64] = 0.5 * (1 + np.tanh((logits + self.bias) / 2))
            return alone.astype(np.float32)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        shares: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
        return shares.astype(np.float32)


class TextEncoder(Protocol):
    """An encoder of token ids to unit embeddings in the space of the model's images. Several
    threads may call it.
    """

    # the model's name, for people
    name: str
    # the whole model's, that of its image encoder
    fingerprint: Fingerprint
    dimension: int
    tokenizer: Tokenizer
    calibration: Calibration
    engine: str
    precision: str

    def encode(self, ids: TokenBatch) -> Embeddings:
        """Encodes int64 [N, T], T at most the tokenizer's context length, to float32
        [N, dimension] of unit rows.

        Rows of like length are computed together, and padding that a model does not see is cut
        off. Raises InvalidInput where the batch has another shape, Unavailable where the engine
        fails. A row without a direction comes back as zeros.
        """
        ...

    def close(self) -> None:
        """Frees the engine; a second call does nothing. Then an encoder with an engine raises
        Unavailable.
        """
        ...
