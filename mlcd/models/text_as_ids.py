"""Texts as ids for a server that tokenizes itself: an id is 4 bytes of UTF-8.

A subclass of `Tokenizer`, because ten modules pass texts as ids from one: the server's queues,
cache and shared memory among them. Texts that stay texts would need a second form of each.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.models.tokenizer import Tokenized, Tokenizer

CONTEXT_LENGTH: Final = 2048
_BYTES: Final = 4 * CONTEXT_LENGTH
_PAD: Final = b"\xff"  # occurs in no UTF-8


class Utf8Tokenizer(Tokenizer):
    """Returns a text's UTF-8 as ids, cut after the last character within 8,192 bytes.

    Of `Tokenizer`, it supports `__call__`, `tokenize` and `context_length`.
    """

    def __init__(self) -> None:
        super().__init__(tokenizers.Tokenizer(tokenizers.models.BPE()), {}, CONTEXT_LENGTH)

    def tokenize(self, texts: Sequence[str], *, with_cut: bool = False) -> Tokenized:
        try:
            encoded = [text.encode() for text in texts]
        except UnicodeEncodeError as error:
            raise InvalidInput(
                "a text must be valid Unicode, got half of a surrogate pair"
            ) from error
        parts = [text[:_BYTES].decode(errors="ignore").encode() for text in encoded]
        padded = b"".join(part.ljust(_BYTES, _PAD) for part in parts)
        ids = np.frombuffer(padded, "<u4").astype(np.int64).reshape(len(parts), CONTEXT_LENGTH)
        num = np.array([-(-len(part) // 4) for part in parts], np.int64)
        cut = np.array([with_cut and len(text) > _BYTES for text in encoded], np.bool_)
        return Tokenized(ids, num, cut)


def to_text(ids: NDArray[np.int64]) -> str:
    """Returns the text of one row of ids of `Utf8Tokenizer`."""
    return ids.astype("<u4").tobytes().rstrip(_PAD).decode(errors="replace")
