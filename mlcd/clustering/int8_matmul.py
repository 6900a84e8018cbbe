"""Multiplies rows and centers in eight-bit integers, with oneDNN through torch.

A row x becomes x' = s q: whole numbers q of at most 127 in size and one scale s. The sums of
products of whole numbers are exact. If the CPU lacks VNNI, oneDNN adds pairs of products in
sixteen bits, which may saturate; then the rows are quantized to 63, so that no pair can.

One large component makes a row's scale coarse, and embeddings in a narrow cone share this
component. So the mean m of the centers is subtracted from rows and centers alike:

    x.c - x.m = (x - m).(c - m) + m.(c - m),

where the last term is one number per center, which is added to the products.

This module is imported only if torch is installed; the labels are the same without it.
"""

from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.clustering.certificate import ROOM
from mlcd.clustering.matmul import (
    Loaded,
    Rounding,
    RoundRows,
    Sums,
    inner_products,
    lengths_of,
    mean_of,
)
from mlcd.cores import cpu_features
from mlcd.types import Embeddings

_CENTER_LEVELS: Final = 127
_WIDE, _NARROW = 127, 63  # largest quantized values of rows, with and without VNNI
_BLOCK_CENTERS: Final = 4096
_PACKED_FOR: Final = 1024  # rows
_TILE: Final = 64  # centers
MOST_COMPONENTS: Final = 1 << 15  # int32 has room for sums of twice as many
_MOST_PRODUCT: Final = 1 << 15  # of two quantized values, one of them unsigned
_BEYOND: Final = 2.0**200  # a length for which no bound is valid
_NEAR: Final = 1e-3
_LEAST_SCALE: Final = np.float32(1e-30)  # avoids division by zero
_AT_ONCE: Final = 1 << 18  # components: few enough for the cache


class EightBitRows(NamedTuple):
    """Rows y = x - m quantized to whole numbers q with a scale s per row, so that s q is near y.

    unsigned: q + levels + 1, uint8 [B, D]. All other fields are float32 [B]: scales: s; squares:
    the sum of q^2; squared_errors: the sum of (y - s q)^2; offsets: x.m.
    """

    unsigned: NDArray[np.uint8]
    scales: NDArray[np.float32]
    squares: NDArray[np.float32]
    squared_errors: NDArray[np.float32]
    offsets: NDArray[np.float32]

    @classmethod
    def unwritten(cls, num_rows: int, dimension: int) -> "EightBitRows":
        return cls(np.empty((num_rows, dimension), np.uint8), *np.empty((4, num_rows), np.float32))


class Int8Matmul:
    """The arithmetic of eight-bit integers; see `mlcd.clustering.matmul.Matmul`."""

    name = "torch int8 cpu"

    def __init__(self, centers_KD: Embeddings, block: int = _BLOCK_CENTERS) -> None:
        self._block = block
        self._row_levels = row_levels()
        self._zero = self._row_levels + 1
        # Sums are exact. oneDNN shifts the rows to unsigned numbers, subtracts the shift, converts
        # to float32 and scales; a term is added. That is less than eight roundings to 24 bits of
        # numbers of at most 2 D |y'| D', as |y'| is at least the largest number times the scale.
        self.rounding = Rounding(inputs=True, sum_roundoff=2.0**-20)
        self.shift = mean_of(centers_KD)
        self._blocks = [
            _packed(centers_KD[start : start + self._block] - self.shift, self.shift)
            for start in range(0, len(centers_KD), self._block)
        ]
        # oneDNN scales the sums for the centers before they are scaled for the rows
        scale = max((float(scales.max()) for (_, scales, _), _ in self._blocks), default=0.0)
        self._holds = scale * centers_KD.shape[1] * _MOST_PRODUCT < ROOM

    def load(self, rows_BD: Embeddings, round_rows: RoundRows | None = None) -> Loaded:
        rounded = EightBitRows.unwritten(*rows_BD.shape)
        (round_rows or round_in_numpy)(rows_BD, self.shift, self._row_levels, rounded)
        lengths = rounded.scales * lengths_of(rounded.squares, rows_BD.shape[1])
        errors = lengths_of(rounded.squared_errors, rows_BD.shape[1])
        # float32 rounding of the differences and of the shifted rows
        errors += 2.0**-22 * (lengths + errors)
        if not self._holds:
            lengths = np.full(len(rows_BD), _BEYOND)
        data = torch.from_numpy(rounded.unsigned), torch.from_numpy(rounded.scales)[:, None]
        return Loaded(data, lengths, errors, rounded.offsets.astype(np.float64))

    def rounded_centers(self, centers_CD: Embeddings) -> NDArray[np.floating]:
        numbers, scales = quantize(centers_CD - self.shift, _CENTER_LEVELS)
        return numbers.astype(np.float64) * scales[:, None]

    def multiply(self, rows: tuple[Tensor, Tensor], start: int, stop: int) -> NDArray[np.float32]:
        values, scales, terms = self._sums(rows, start, stop)
        product_BC = values[:, : len(terms)]
        # contiguous in memory, even if a tile is not full
        out = product_BC if product_BC.is_contiguous() else torch.empty(product_BC.shape)
        return torch.addcmul(terms, product_BC, scales, out=out).numpy()

    def sums(self, rows: tuple[Tensor, Tensor], start: int, stop: int) -> Sums:
        values, scales, terms = self._sums(rows, start, stop)
        return Sums(values.numpy(), scales[:, 0].numpy(), terms.numpy())

    def _sums(
        self, rows: tuple[Tensor, Tensor], start: int, stop: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        numbers, scales = rows
        packed, terms = self._blocks[start // self._block]
        return _product(numbers, self._zero, *packed), scales, terms[: stop - start]


def round_in_numpy(
    rows_BD: Embeddings, shift_D: NDArray[np.float32], levels: int, rounded: EightBitRows
) -> None:
    """Quantizes the rows, less the shift, to whole numbers from -`levels` to `levels`."""
    at_once = max(1, _AT_ONCE // rows_BD.shape[1])
    for start in range(0, len(rows_BD), at_once):
        part = slice(start, start + at_once)
        rows = rows_BD[part] - shift_D
        numbers, scales = quantize(rows, levels)
        rounded.scales[part] = scales
        np.add(numbers, np.float32(levels + 1), out=rounded.unsigned[part], casting="unsafe")
        rounded.squares[part] = inner_products(numbers, numbers)
        rows -= numbers * scales[:, None]
        rounded.squared_errors[part] = inner_products(rows, rows)
        rounded.offsets[part] = rows_BD[part] @ shift_D


def quantize(rows_BD: Embeddings, levels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns whole numbers from -`levels` to `levels`, and the scale of each row."""
    largest = np.maximum(rows_BD.max(axis=1), -rows_BD.min(axis=1))
    scales = np.maximum(largest / np.float32(levels), _LEAST_SCALE)
    numbers = rows_BD / scales[:, None]
    return np.rint(numbers, out=numbers), scales


def _packed(
    centers_CD: Embeddings, shift: NDArray[np.float32]
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Returns shifted centers packed for oneDNN, and the term of each, padded to full tiles: an
    incomplete last tile makes oneDNN slower by a half.
    """
    full = -(-len(centers_CD) // _TILE) * _TILE
    centers_CD = np.pad(centers_CD, ((0, full - len(centers_CD)), (0, 0)))
    numbers, scales = quantize(centers_CD, _CENTER_LEVELS)
    weights = torch.ops.onednn.qlinear_prepack(
        torch.from_numpy(numbers.astype(np.int8)), [_PACKED_FOR, centers_CD.shape[1]]
    )
    terms = (centers_CD.astype(np.float64) @ shift.astype(np.float64)).astype(np.float32)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    return (weights, torch.from_numpy(scales), zeros), torch.from_numpy(terms)


def _product(numbers: Tensor, zero: int, weights: Any, scales: Tensor, zeros: Tensor) -> Tensor:
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        numbers, 1.0, zero, weights, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


@cache
def computes_int8() -> bool:
    """Returns whether this torch multiplies eight-bit integers as this module expects."""
    try:
        return row_levels() == _WIDE or _exact(_NARROW)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


@cache
def row_levels() -> int:
    """Returns the largest quantized value of rows for which sums do not saturate here."""
    return _WIDE if "AVX512_VNNI" in cpu_features() and _exact(_WIDE) else _NARROW


def _exact(levels: int) -> bool:
    """Returns whether sums of the largest products are exact, for rows of either sign."""
    shape = (_PACKED_FOR, 256)
    matrix = np.ones((_BLOCK_CENTERS, shape[1]), dtype=np.float32)
    packed, _ = _packed(matrix, np.zeros(shape[1], dtype=np.float32))
    for sign in (1, -1):
        numbers = torch.full(shape, levels + 1 + sign * levels, dtype=torch.uint8)
        products = _product(numbers, levels + 1, *packed)
        if (products - sign * levels * shape[1]).abs().max() > _NEAR * shape[1]:
            return False
    return True
