"""The interface by which k-means reads rows of embeddings, block by block, from memory or files.

Blocks come from explicit reads, never from memory maps, because mapped pages count as memory of the
process.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ArtifactInvalid, InvalidInput
from mlcd.randomness import hash_counters
from mlcd.types import Embeddings, unit_rows

BLOCK_ROWS: Final = 8192
_SPAN: Final = 8  # a span with more rows per wanted row is read row by row instead
_READ_TOGETHER: Final = 1024
_UNIT_TOLERANCE: Final = 1e-6  # of squared lengths: above float32 rounding, below float16 rounding
_HASHED_AT_ONCE: Final = 1 << 20
_KEPT_BYTES: Final = 128 * 2**20  # maximum bytes of rows that a process keeps


class Rows(Protocol):
    """A matrix [num_rows, dimension] of float32, its rows numbered from 0."""

    @property
    def num_rows(self) -> int: ...

    @property
    def dimension(self) -> int: ...

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, Embeddings]]:
        """Yields (id of the first row, rows) for the rows [start, stop), in order."""
        ...

    def read(self, rows: NDArray[np.int64]) -> Embeddings:
        """Returns the rows with these ids, in this order: [len(rows), D]."""
        ...

    def describe(self, row: int) -> str:
        """Returns the name of a row for an error message."""
        ...


def kept_bytes(num_rows: int, dimension: int) -> int:
    """Returns the bytes of rows that a process keeps in memory over all passes: all rows if they
    are few, else 0.
    """
    num_bytes = 4 * num_rows * dimension
    return num_bytes if num_bytes <= _KEPT_BYTES else 0


class ArrayRows:
    """The rows of one or several arrays in memory; an array may be a memory map."""

    def __init__(self, blocks: Sequence[NDArray[np.floating]]) -> None:
        for block in blocks:
            if block.ndim != 2 or block.dtype not in (np.float32, np.float16):
                raise InvalidInput(
                    f"embeddings must be a float32 matrix, got {block.dtype} {list(block.shape)}"
                )
        self._blocks = blocks
        self._offsets = np.cumsum([0, *(len(block) for block in blocks)])

    @property
    def num_rows(self) -> int:
        return int(self._offsets[-1])

    @property
    def dimension(self) -> int:
        return int(self._blocks[0].shape[1]) if self._blocks else 0

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, Embeddings]]:
        for array, offset in zip(self._blocks, self._offsets, strict=False):
            for first in range(
                max(start, int(offset)), min(stop, int(offset) + len(array)), BLOCK_ROWS
            ):
                local = first - int(offset)
                last = min(local + BLOCK_ROWS, stop - int(offset))
                yield first, np.asarray(array[local:last], dtype=np.float32)

    def read(self, rows: NDArray[np.int64]) -> Embeddings:
        out = np.empty((len(rows), self.dimension), dtype=np.float32)
        owner = np.searchsorted(self._offsets, rows, side="right") - 1
        for part in np.unique(owner):
            in_part = owner == part
            out[in_part] = self._blocks[part][rows[in_part] - self._offsets[part]]
        return out

    def describe(self, row: int) -> str:
        return f"embeddings row {row}"


class FileRows:
    """The rows of .npy files [n, D] float32 or float16, one after the other."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        arrays = [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
        for path, array in zip(paths, arrays, strict=True):
            if (
                array.ndim != 2
                or array.dtype not in (np.float32, np.float16)
                or not array.flags.c_contiguous
            ):
                raise ArtifactInvalid(
                    f"{path} is not a matrix of floats", remedy="embed the images again"
                )
            if array.shape[1] != arrays[0].shape[1]:
                raise ArtifactInvalid(
                    f"{path} has another dimension than {paths[0]}", remedy="embed the images again"
                )
        self._headers = [(int(array.offset), array.dtype) for array in arrays]
        self._offsets = np.cumsum([0, *(len(array) for array in arrays)])
        self._dimension = int(arrays[0].shape[1]) if arrays else 0

    @property
    def num_rows(self) -> int:
        return int(self._offsets[-1])

    @property
    def dimension(self) -> int:
        return self._dimension

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, Embeddings]]:
        for part in range(len(self._paths)):
            first_id, end = int(self._offsets[part]), int(self._offsets[part + 1])
            for first in range(max(start, first_id), min(stop, end), BLOCK_ROWS):
                yield (
                    first,
                    self._span(part, first - first_id, min(BLOCK_ROWS, min(stop, end) - first)),
                )

    def read(self, rows: NDArray[np.int64]) -> Embeddings:
        out = np.empty((len(rows), self.dimension), dtype=np.float32)
        order = np.argsort(rows, kind="stable")
        part_of = np.searchsorted(self._offsets, rows[order], side="right") - 1
        for part in np.unique(part_of):
            mine = order[part_of == part]
            for start in range(0, len(mine), _READ_TOGETHER):
                positions = mine[start : start + _READ_TOGETHER]
                out[positions] = self._gather(int(part), rows[positions] - self._offsets[part])
        return out

    def describe(self, row: int) -> str:
        return f"embeddings row {row}"

    def _gather(self, part: int, local: NDArray[np.int64]) -> Embeddings:
        first, span = int(local[0]), int(local[-1] - local[0]) + 1
        if span <= _SPAN * len(local):
            return self._span(part, first, span)[local - first]
        offset, dtype = self._headers[part]
        values = np.empty((len(local), self.dimension), dtype=dtype)
        with self._paths[part].open("rb", buffering=0) as file:
            for row, into in zip(local.tolist(), values, strict=True):
                file.seek(offset + row * into.nbytes)
                if file.readinto(into) != into.nbytes:
                    raise self._cut_short(part)
        return values.astype(np.float32, copy=False)

    def _span(self, part: int, start: int, num_rows: int) -> Embeddings:
        offset, dtype = self._headers[part]
        skipped = offset + start * self.dimension * dtype.itemsize
        values = np.fromfile(
            self._paths[part], dtype=dtype, count=num_rows * self.dimension, offset=skipped
        )
        if len(values) != num_rows * self.dimension:
            raise self._cut_short(part)
        return values.reshape(num_rows, self.dimension).astype(np.float32, copy=False)

    def _cut_short(self, part: int) -> ArtifactInvalid:
        return ArtifactInvalid(
            f"{self._paths[part]} has been cut short", remedy="embed the images again"
        )


class SelectedRows:
    """A selection of rows. selected: row ids in ascending order."""

    def __init__(self, rows: Rows, selected: NDArray[np.int64]) -> None:
        self._rows, self.selected = rows, selected

    @property
    def num_rows(self) -> int:
        return len(self.selected)

    @property
    def dimension(self) -> int:
        return self._rows.dimension

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, Embeddings]]:
        for first in range(start, stop, BLOCK_ROWS):
            yield first, self._rows.read(self.selected[first : min(first + BLOCK_ROWS, stop)])

    def read(self, rows: NDArray[np.int64]) -> Embeddings:
        return self._rows.read(self.selected[rows])

    def describe(self, row: int) -> str:
        return self._rows.describe(int(self.selected[row]))


class UnitRows:
    """The rows, checked and normalized to unit length. mean: subtracted first; None for none.

    Raises InvalidInput for the first row that contains NaN or Inf or lacks a direction.
    """

    def __init__(self, rows: Rows, mean: NDArray[np.float32] | None = None) -> None:
        self._rows, self._mean = rows, mean

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    @property
    def dimension(self) -> int:
        return self._rows.dimension

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, Embeddings]]:
        for first, block in self._rows.blocks(start, stop):
            yield first, self._unit(block, range(first, first + len(block)))

    def read(self, rows: NDArray[np.int64]) -> Embeddings:
        return self._unit(self._rows.read(rows), rows)

    def describe(self, row: int) -> str:
        return self._rows.describe(row)

    def _unit(self, block: Embeddings, row_ids: Sequence[int] | NDArray[np.int64]) -> Embeddings:
        squares = _squares(block)
        if not np.isfinite(squares).all():
            self._refuse(row_ids, ~np.isfinite(squares), "holds NaN or Inf")
        if self._mean is not None:
            block = block - self._mean
            squares = _squares(block)
        if not squares.all():
            self._refuse(row_ids, squares == 0, "has no direction (norm 0)")
        is_scaled = np.abs(squares - 1) > _UNIT_TOLERANCE
        if not is_scaled.any():
            return block
        return np.where(is_scaled[:, None], unit_rows(block), block)

    def _refuse(
        self, row_ids: Sequence[int] | NDArray[np.int64], bad: NDArray[np.bool_], why: str
    ) -> None:
        first = int(row_ids[int(np.flatnonzero(bad)[0])])
        raise InvalidInput(f"{self._rows.describe(first)} {why}", remedy="remove it")


def _squares(rows: Embeddings) -> NDArray[np.floating]:
    """Returns the squared lengths, [N]: in float64 if they underflow or overflow in float32."""
    squares: NDArray[np.floating] = np.einsum("nd,nd->n", rows, rows)
    extreme = ~(np.isfinite(squares) & (squares > 0))
    if extreme.any():
        squares = squares.astype(np.float64)
        squares[extreme] = np.square(rows[extreme], dtype=np.float64).sum(axis=1)
    return squares


def lowest_hashed(num_rows: int, num_wanted: int, *counters: int) -> NDArray[np.int64]:
    """Returns the `num_wanted` row ids of lowest hash(counters, row), int64, in the order of their
    hashes.

    Memory is a few times the result, because rows above a threshold are dropped at once.
    """
    if num_wanted >= num_rows:
        return _by_hash(np.arange(num_rows), *counters)
    share = min(1.0, (num_wanted + 6 * num_wanted**0.5 + 16) / num_rows)
    limit = np.uint64(int(share * (2**64 - 2**11)))
    parts = []
    for start in range(0, num_rows, _HASHED_AT_ONCE):
        rows = np.arange(start, min(start + _HASHED_AT_ONCE, num_rows))
        parts.append(rows[hash_counters(*counters, rows) <= limit])
    chosen_rows = np.concatenate(parts)
    # A miss by six standard deviations is nearly impossible, but the result must still be right.
    if len(chosen_rows) < num_wanted:
        chosen_rows = np.arange(num_rows)
    return _by_hash(chosen_rows, *counters)[:num_wanted]


def _by_hash(rows: NDArray[np.int64], *counters: int) -> NDArray[np.int64]:
    return rows[np.argsort(hash_counters(*counters, rows), kind="stable")]
