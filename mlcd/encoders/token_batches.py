"""Batches texts of similar length, without padding that does not affect the embedding."""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.encoders.unit_rows import MAX_BATCH, unit_or_zero
from mlcd.errors import InvalidInput
from mlcd.models.text_part import TextSettings
from mlcd.models.tokenizer import Tokenizer
from mlcd.types import Embeddings, TokenBatch

# the cost of one more engine call (which reads all weights again), as a number of tokens
_CALL_TOKENS: Final = 16


class TokenBatches:
    """Splits rows of token ids into batches, by the number of tokens that a tower needs of each."""

    def __init__(self, settings: TextSettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        # padding tokens to keep: the end-of-text token if it is also the padding token
        self._num_kept = int(tokenizer.ends_with_padding)

    def encode(
        self, ids: TokenBatch, run: Callable[[TokenBatch], NDArray[np.floating]]
    ) -> Embeddings:
        """Returns unit rows in the order of the texts; calls `run` with batches of at most
        MAX_BATCH rows.
        """
        rows = np.empty((len(ids), self._settings.dimension), np.float32)
        for row_indices, part in self.split(ids):
            rows[row_indices] = unit_or_zero(run(part))
        return rows

    def split(
        self, ids: TokenBatch, *, max_batch: int = MAX_BATCH, multiple: int = 1
    ) -> list[tuple[NDArray[np.int64], TokenBatch]]:
        """Returns batches: indices of their rows, and token ids trimmed to the longest text.

        multiple: lengths are rounded up to a multiple of it, at most to T. Raises InvalidInput for
        another dtype or shape.
        """
        self.check(ids)
        lengths = np.minimum(-(-self.lengths(ids) // multiple) * multiple, ids.shape[1])
        return [
            (row_indices, ids[row_indices, : lengths[row_indices].max()])
            for row_indices in batches(lengths, max_batch)
        ]

    def check(self, ids: TokenBatch) -> None:
        """Raises InvalidInput unless ids are int64 [N, T], T from 1 to the context length."""
        longest = self._settings.context_length
        if ids.dtype != np.int64 or ids.ndim != 2 or not 1 <= ids.shape[1] <= longest:
            raise InvalidInput(
                f"expected int64 token ids of shape [N, 1..{longest}], got {ids.dtype}"
                f" {list(ids.shape)}"
            )

    def lengths(self, ids: TokenBatch) -> NDArray[np.int64]:
        """Returns the number of tokens that the tower needs of each row, [N]."""
        num = ids.shape[1]
        if not self._settings.trims_padding:
            return np.full(len(ids), num)
        is_text = ids != self._settings.pad_id
        lengths = np.where(is_text.any(axis=1), num - is_text[:, ::-1].argmax(axis=1), 0)
        return np.asarray(np.clip(lengths + self._num_kept, 1, num), np.int64)


def batches(lengths: NDArray[np.int64], max_batch: int = MAX_BATCH) -> list[NDArray[np.int64]]:
    """Returns the indices of the rows in each batch, at most `max_batch` per batch.

    Splits the rows, sorted by length, so that the number of tokens with padding, plus _CALL_TOKENS
    per batch, is smallest (dynamic programming).
    """
    order = np.argsort(lengths, kind="stable")
    sorted_lengths = lengths[order].tolist()
    # for the first n rows: the lowest cost, and the start of the last batch of that split
    lowest_costs, last_starts = [0], [0]
    for stop, longest in enumerate(sorted_lengths, 1):
        costs = [
            (lowest_costs[start] + (stop - start) * longest + _CALL_TOKENS, start)
            for start in range(max(0, stop - max_batch), stop)
        ]
        cost, start = min(costs)
        lowest_costs.append(cost)
        last_starts.append(start)
    row_indices, stop = [], len(order)
    while stop:
        row_indices.append(order[last_starts[stop] : stop])
        stop = last_starts[stop]
    return row_indices[::-1]
