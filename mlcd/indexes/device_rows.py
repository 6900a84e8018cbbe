"""Rows that a device holds in float32, and an exact search among them by torch.

Shapes: Q queries, N rows, A rows added to them, D dimension.
"""

import threading
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.types import Embeddings, Neighbors

_BLOCK_QUERIES: Final = 256
_BLOCK_SCORES: Final = 1 << 26  # scores in memory at one time: 256 MiB
_COPIED_ROWS: Final = 1 << 16
_LEAST_ADDED: Final = 4096  # rows that the memory for additions has at first


def find_gpu() -> str | None:
    return "cuda" if torch.cuda.is_available() else None


def free_bytes() -> int:
    """Returns the GPU's free memory, after torch gave back what it holds for reuse, which other
    libraries could not take.
    """
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


class DeviceRows:
    """Rows on a device, which several threads may search at once. Any method raises RuntimeError
    if the device lacks memory, or has failed.
    """

    def __init__(self, rows: Embeddings, device: str) -> None:
        """Copies the rows [N, D]."""
        self._device = device
        self._rows_ND = torch.empty(rows.shape, device=device)
        _copy(rows, self._rows_ND)
        self._added_AD = torch.empty((0, rows.shape[1]), device=device)
        self._num_added = 0
        self._lock = threading.Lock()

    def address(self) -> int:
        """Returns the address on the device of the rows: float32, without gaps, all copied."""
        if self._rows_ND.is_cuda:
            torch.cuda.synchronize(self._rows_ND.device)
        return self._rows_ND.data_ptr()

    def search(
        self,
        queries: Embeddings,
        top: int,
        added: Embeddings,
        allowed: NDArray[np.bool_] | None,
        *,
        first: int = 0,
    ) -> Neighbors:
        """Returns the `top` rows of highest inner product with each query: ids int64 [Q, top],
        padded with -1; the same as `mlcd.indexes.scan.scan`.

        added: [A, D], rows with the ids from N on; each call has those of earlier calls, or a
        prefix of them, first, so that only new ones are copied. allowed: bool [N + A], mask of the
        rows to search; None allows all. first: id of the first row to search, at most N.
        """
        with torch.inference_mode():
            tables = (self._rows_ND[first:], self._append(added))
            mask = None if allowed is None else torch.from_numpy(allowed[first:]).to(self._device)
            blocks = [
                _search(part.to(self._device), tables, mask, top)
                for part in torch.tensor(queries).split(_BLOCK_QUERIES)
            ]
            scores, ids = (torch.cat(part).cpu().numpy() for part in zip(*blocks, strict=True))
        ids = np.where(np.isneginf(scores), -1, ids + first)
        padding = ((0, 0), (0, top - ids.shape[1]))
        ids = np.pad(ids, padding, constant_values=-1)
        scores = np.pad(scores, padding, constant_values=-np.inf)
        order = np.lexsort((ids, -scores), axis=1)
        return Neighbors(
            np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
        )

    def _append(self, added: Embeddings) -> Tensor:
        """Copies the rows that are not on the device yet, and returns all of `added`."""
        num = len(added)
        with self._lock:
            if num > len(self._added_AD):
                capacity = max(_LEAST_ADDED, 2 * num)
                larger = self._added_AD.new_empty((capacity, added.shape[1]))
                larger[: self._num_added] = self._added_AD[: self._num_added]
                self._added_AD = larger
            if num > self._num_added:
                _copy(added[self._num_added :], self._added_AD[self._num_added : num])
                self._num_added = num
            return self._added_AD[:num]


def _copy(rows: Embeddings, out: Tensor) -> None:
    for start in range(0, len(rows), _COPIED_ROWS):
        part = slice(start, start + _COPIED_ROWS)
        out[part] = torch.tensor(rows[part])  # a copy: the rows may be a read-only map of a file


def _search(
    queries_QD: Tensor, tables: tuple[Tensor, ...], mask: Tensor | None, top: int
) -> tuple[Tensor, Tensor]:
    """Returns the best scores and their rows, [Q, min(top, rows)], in descending order."""
    num_queries = len(queries_QD)
    best = queries_QD.new_empty((num_queries, 0))
    ids = torch.empty((num_queries, 0), dtype=torch.int64, device=queries_QD.device)
    for first, rows in _blocks(tables, max(1, _BLOCK_SCORES // max(1, num_queries))):
        scores = queries_QD @ rows.T
        if mask is not None:
            scores.masked_fill_(~mask[first : first + len(rows)], -torch.inf)
        values, places = scores.topk(min(top, len(rows)), dim=1)
        best, ids = torch.cat([best, values], 1), torch.cat([ids, places + first], 1)
        best, order = best.topk(min(top, best.shape[1]), dim=1)
        ids = ids.gather(1, order)
    return best, ids


def _blocks(tables: tuple[Tensor, ...], num_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yields the id of the first row, and the rows, of each block."""
    first = 0
    for table in tables:
        for block in table.split(num_rows) if len(table) else ():
            yield first, block
            first += len(block)
