"""The token ids of captions, by the tokenizer of the run."""

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
    """Opens the tokenizer of a text tower that begins with random weights.

    Raises ArtifactInvalid or NotFound if it cannot be read.
    """
    if config.tokenizer is not None:
        return Tokenizer.read(Path(config.tokenizer), config.context_length)
    from mlcd.export.starter.sentences import sentence_tokenizer

    backend = sentence_tokenizer(config.context_length)
    settings = {"pad_token": "[PAD]", "tokenizer_class": "BertTokenizer", "do_lower_case": True}
    return Tokenizer(backend, settings, config.context_length)


def end_of_text(tokenizer: Tokenizer) -> int:
    """Returns the id that ends every text. Raises ConfigInvalid if there is none."""
    tokenized = tokenizer.tokenize(_PROBES)
    ends = {int(ids[num - 1]) for ids, num in zip(tokenized.ids, tokenized.num, strict=True) if num}
    if len(ends) != 1 or not tokenized.num.all() or not tokenizer.pads_right:
        raise ConfigInvalid(
            "the tokenizer does not end each text with one token and pad on the right",
            remedy="give text.tokenizer one that does, such as CLIP's",
        )
    return ends.pop()


def digest(tokenizer: Tokenizer) -> str:
    """Returns the SHA-256 of all that the tokenizer does to a text."""
    return hashlib.sha256(tokenizer.definition().encode()).hexdigest()


@dataclass(frozen=True)
class CaptionTokens:
    """The tokenizer of a tower.

    trims: whether padding at the end of rows is cut off, because it does not change results.
    """

    tokenizer: Tokenizer
    trims: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, tower: TextConfig) -> "CaptionTokens":
        causal = tower.causal and tower.pooling != "last"
        return cls(tokenizer, causal and tokenizer.pads_right)

    def ids(self, texts: Sequence[str]) -> Tensor:
        """Returns the ids, int64 [n, T], T at most the context length."""
        tokenized = self.tokenizer.tokenize(texts)
        ids = torch.from_numpy(tokenized.ids)
        return ids[:, : int(tokenized.num.max(initial=1))].contiguous() if self.trims else ids
