"""The interface of text encoders (token ids to embeddings); `encoder.py` has that of images."""

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
    """The parameters that turn the cosine of an image and a text into a probability.

    scale: factor of cosines, exp(logit_scale) of the checkpoint. bias: SigLIP's bias; a pair's
    probability is sigmoid(scale * cosine + bias). Without a bias (CLIP), an image's probabilities
    are the softmax of scale * cosine over the texts.
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
            # The sigmoid as a tanh, because exp() could overflow.
            sigmoids: NDArray[np.float64] = 0.5 * (1 + np.tanh((logits + self.bias) / 2))
            return sigmoids.astype(np.float32)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        softmax: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
        return softmax.astype(np.float32)


class TextEncoder(Protocol):
    """An encoder of token ids to unit embeddings in the space of the model's images. Several
    threads may call it.
    """

    # the model's name, for people
    name: str
    # the fingerprint of the whole model, equal to its image encoder's
    fingerprint: Fingerprint
    dimension: int
    tokenizer: Tokenizer
    calibration: Calibration
    engine: str
    precision: str

    def encode(self, ids: TokenBatch) -> Embeddings:
        """Encodes int64 [N, T], T at most the tokenizer's context length, to float32
        [N, dimension] of unit rows.

        Batches rows of similar length and trims padding that does not affect the embedding. A row
        of norm 0 is returned as zeros. Raises InvalidInput for a batch of another shape, and
        Unavailable if the engine fails.
        """
        ...

    def close(self) -> None:
        """Frees the engine, after which `encode` of an encoder with an engine raises Unavailable; a
        second call does nothing.
        """
        ...
