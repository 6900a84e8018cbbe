"""The batches of texts: rows of like length together, without the padding that a tower does not
see.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.encoders.unit_rows import MAX_BATCH, unit_or_zero
from mlcd.errors import InvalidInput
from mlcd.models.text_part import TextSettings
from mlcd.models.tokenizer import Tokenizer
from mlcd.types import Embeddings, TokenBatch

# what one more call of an engine costs, in tokens of a row: the weights are read once more
_CALL_TOKENS: Final = 16


class TokenBatches:
    """The lengths that a tower sees of rows of ids, and the batches that are made of them."""

    def __init__(self, settings: TextSettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        # an end of text that also pads has to stay
        self._kept = int(tokenizer.ends_with_padding)

    def encode(
        self, ids: TokenBatch, run: Callable[[TokenBatch], NDArray[np.floating]]
    ) -> Embeddings:
        """Returns unit rows of the texts, in their order; `run` gets batches of at most
        MAX_BATCH.
        """
        rows = np.empty((len(ids), self._settings.dimension), np.float32)
        for numbers, part in self.split(ids):
            rows[numbers] = unit_or_zero(run(part))
        return rows

    def split(
        self, ids: TokenBatch, *, max_batch: int = MAX_BATCH, multiple: int = 1
    ) -> list[tuple[NDArray[np.int64], TokenBatch]]:
        """Returns the batches: the numbers of their rows, and their ids, cut to the longest text.

        multiple: lengths are rounded up to a multiple of it, at most to the rows' length. Raises
        InvalidInput for another dtype or shape.
        """
        self.check(ids)
        lengths = np.minimum(-(-self.lengths(ids) // multiple) * multiple, ids.shape[1])
        return [
            (numbers, ids[numbers, : lengths[numbers].max()])
            for numbers in batches(lengths, max_batch)
        ]

    def check(self, ids: TokenBatch) -> None:
        """Raises InvalidInput for another dtype or shape than a batch of token ids has."""
        longest = self._settings.context_length
        if ids.dtype != np.int64 or ids.ndim != 2 or not 1 <= ids.shape[1] <= longest:
            raise InvalidInput(
                f"expected int64 token ids of shape [N, 1..{longest}], got {ids.dtype}"
                f" {list(ids.shape)}"
            )

    def lengths(self, ids: TokenBatch) -> NDArray[np.int64]:
        """Returns how many tokens of each row the tower has to see, [N]."""
        num = ids.shape[1]
        if not self._settings.trims_padding:
            return np.full(len(ids), num)
        is_text = ids != self._settings.pad_id
        lengths = np.where(is_text.any(axis=1), num - is_text[:, ::-1].argmax(axis=1), 0)
        return np.asarray(np.clip(lengths + self._kept, 1, num), np.int64)


def batches(lengths: NDArray[np.int64], max_batch: int = MAX_BATCH) -> list[NDArray[np.int64]]:
    """Returns the numbers of the rows in each batch, at most `max_batch`.

    Among the ways to cut the rows sorted by length, it is the one of the fewest tokens, padding
    included, where a call counts as some tokens.
    """
    order = np.argsort(lengths, kind="stable")
    in_order = lengths[order].tolist()
    # of the first n rows: the tokens of the best cut, and where its last batch begins
    best, begins = [0], [0]
    for stop, longest in enumerate(in_order, 1):
        costs = [
            (best[start] + (stop - start) * longest + _CALL_TOKENS, start)
            for start in range(max(0, stop - max_batch), stop)
        ]
        cost, start = min(costs)
        best.append(cost)
        begins.append(start)
    row_numbers, stop = [], len(order)
    while stop:
        row_numbers.append(order[begins[stop] : stop])
        stop = begins[stop]
    return row_numbers[::-1]
