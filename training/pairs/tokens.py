"""Token ids of captions, by the run's tokenizer."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from mlcd.errors import ConfigInvalid
from mlcd.models.text import TextConfig
from mlcd.models.tokenizer import Tokenizer
from mlcd.training.pairs.pairs_config import TextTowerConfig

_PROBES: Final = ("", "a", "a red bag")


def open_tokenizer(config: TextTowerConfig) -> Tokenizer:
    """Opens the tokenizer of a text tower that starts with random weights.

    Raises ArtifactInvalid or NotFound if it cannot be read.
    """
    if config.tokenizer is not None:
        return Tokenizer.read(Path(config.tokenizer), config.context_length)
    from mlcd.export.starter.sentences import sentence_tokenizer

    backend = sentence_tokenizer(config.context_length)
    settings = {"pad_token": "[PAD]", "tokenizer_class": "BertTokenizer", "do_lower_case": True}
    return Tokenizer(backend, settings, config.context_length)


def end_of_text(tokenizer: Tokenizer) -> int:
    """Returns the id of the token that ends every text. Raises ConfigInvalid if there is none."""
    tokenized = tokenizer.tokenize(_PROBES)
    ends = {int(ids[num - 1]) for ids, num in zip(tokenized.ids, tokenized.num, strict=True) if num}
    if len(ends) != 1 or not tokenized.num.all() or not tokenizer.pads_right:
        raise ConfigInvalid(
            "the tokenizer must end each text with the same token and pad on the right",
            remedy="set text.tokenizer to one that does, such as CLIP's",
        )
    return ends.pop()


def digest(tokenizer: Tokenizer) -> str:
    """Returns the SHA-256 of the tokenizer's complete definition."""
    return hashlib.sha256(tokenizer.definition().encode()).hexdigest()


@dataclass(frozen=True)
class CaptionTokens:
    """The tokenizer of a tower.

    trims: remove the padding columns that all rows share, as they do not change results.
    """

    tokenizer: Tokenizer
    trims: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, tower: TextConfig) -> "CaptionTokens":
        # Pooling "last" reads the last position, so its padding must stay.
        ignores_padding = tower.causal and tower.pooling != "last"
        return cls(tokenizer, ignores_padding and tokenizer.pads_right)

    def ids(self, texts: Sequence[str]) -> Tensor:
        """Returns the token ids, int64 [n, T]; T is at most the context length."""
        tokenized = self.tokenizer.tokenize(texts)
        ids = torch.from_numpy(tokenized.ids)
        return ids[:, : int(tokenized.num.max(initial=1))].contiguous() if self.trims else ids
