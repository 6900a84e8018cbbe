"""Checks texts before they are sent, and collects them into batches."""

import os
from dataclasses import dataclass
from typing import Final

from mlcd.errors import InvalidInput, TextRejected
from mlcd.text_checks import check_text

# texts are small: one request contains 8 times `batch_size` texts
TIMES_BATCH: Final = 8


@dataclass(frozen=True)
class Texts:
    """A batch of texts. items: per text, the text or the error why it cannot be sent."""

    items: list[str | TextRejected]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def sendable(self) -> list[str]:
        return [text for text in self.items if isinstance(text, str)]


class TextBatcher:
    """Collects texts into batches of at most `num` texts."""

    def __init__(self, *, num: int, max_chars: int | None) -> None:
        """max_chars: the server's limit of characters per text; None if unknown."""
        self._num, self._max_chars = num, max_chars
        self._texts: list[str | TextRejected] = []

    def push(self, text: object) -> Texts | None:
        """Adds one text; returns a completed batch, or None if no batch is complete."""
        self._texts.append(check_text(text, max_chars=self._max_chars))
        return self.take_rest() if len(self._texts) >= self._num else None

    def take_rest(self) -> Texts | None:
        """Returns the texts that are not yet in a batch, or None if there are none."""
        remaining, self._texts = self._texts, []
        return Texts(remaining) if remaining else None


def check_texts(texts: object) -> None:
    """Raises InvalidInput for a single text, which would be iterated character by character."""
    single = isinstance(texts, str | bytes | bytearray | os.PathLike)
    if single or not (hasattr(texts, "__iter__") or hasattr(texts, "__aiter__")):
        raise InvalidInput(
            "texts must be a series of strings", remedy="put the one text into a list"
        )
