"""The products of rows and centers in eight-bit integers, by oneDNN through torch.

A row x becomes x' = s q: whole numbers q of at most 127 in size and one scale s. The sums of
products of whole numbers are exact. Where the CPU lacks VNNI, oneDNN adds pairs of products in
sixteen bits, which may saturate; there the numbers of the rows stay within 63, so that no pair can.

This module is imported only where torch is installed; the labels are the same without it.
"""

from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.clustering.matmul import Hits, Rounding, entries_above, leading_columns
from mlcd.types import Embeddings

_CENTER_LEVELS: Final = 127
_WIDE, _NARROW = 127, 63  # largest numbers of the rows with and without VNNI
_BLOCK_CENTERS: Final = 4096
_PACKED_FOR: Final = 1024  # rows
_MOST_COMPONENTS: Final = 1 << 15  # int32 holds the sums of twice as many
_TINY: Final = np.float32(1e-30)


class _Loaded(NamedTuple):
    numbers: Tensor
    scales_B: NDArray[np.float32]


class Int8Matmul:
    """The arithmetic of eight-bit integers; see `mlcd.clustering.matmul.Matmul`."""

    name = "torch int8 cpu"
    # Sums are exact. oneDNN shifts the rows to unsigned numbers, subtracts the shift, converts to
    # float32 and scales: a few roundings of numbers of at most 2 D |x'| C', far below this.
    rounding = Rounding(inputs=True, sum_roundoff=2.0**-20, output=2.0**-20)

    def __init__(self, centers_KD: Embeddings, block: int = _BLOCK_CENTERS) -> None:
        self.block = block
        self._row_levels = row_levels()
        self._zero = self._row_levels + 1
        self._blocks = [
            _packed(centers_KD[start : start + self.block])
            for start in range(0, len(centers_KD), self.block)
        ]

    def load(self, rows_BD: Embeddings) -> _Loaded:
        numbers, scales = _quantized(rows_BD, self._row_levels)
        return _Loaded(torch.from_numpy((numbers + np.int16(self._zero)).astype(np.uint8)), scales)

    def rounded(self, rows_BD: Embeddings) -> NDArray[np.floating]:
        numbers, scales = _quantized(rows_BD, self._row_levels)
        return numbers.astype(np.float64) * scales[:, None]

    def rounded_centers(self, centers_CD: Embeddings) -> NDArray[np.floating]:
        numbers, scales = _quantized(centers_CD, _CENTER_LEVELS)
        return numbers.astype(np.float64) * scales[:, None]

    def multiply(self, rows: _Loaded, start: int, stop: int) -> tuple[Tensor, _Loaded]:
        return _product(rows.numbers, self._zero, *self._blocks[start // self.block]), rows

    def leaders(self, product: tuple[Tensor, _Loaded], k: int) -> NDArray[np.int64]:
        return leading_columns(product[0].numpy(), k)

    def above(self, product: tuple[Tensor, _Loaded], threshold_B: NDArray[np.float32]) -> Hits:
        values_BC, scales = product[0].numpy(), product[1].scales_B
        # one step lower than the quotient: the hits may be a few more, never fewer
        lower = np.nextafter(threshold_B / scales, np.float32(-np.inf))
        rows, columns = entries_above(values_BC, lower)
        return Hits(rows, columns, values_BC[rows, columns] * scales[rows])


def _quantized(
    rows_BD: Embeddings, levels: int
) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    scales = np.maximum(np.abs(rows_BD).max(axis=1) / np.float32(levels), _TINY)
    numbers = np.rint(rows_BD / scales[:, None]).clip(-levels, levels)
    return numbers.astype(np.int16), scales


def _packed(centers_CD: Embeddings) -> tuple[Tensor, Tensor, Tensor]:
    numbers, scales = _quantized(centers_CD, _CENTER_LEVELS)
    weights = torch.ops.onednn.qlinear_prepack(
        torch.from_numpy(numbers.astype(np.int8)), [_PACKED_FOR, centers_CD.shape[1]]
    )
    return weights, torch.from_numpy(scales), torch.zeros(len(scales), dtype=torch.int64)


def _product(numbers: Tensor, zero: int, weights: Any, scales: Tensor, zeros: Tensor) -> Tensor:
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        numbers, 1.0, zero, weights, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


@cache
def row_levels() -> int:
    return _WIDE if not _saturates() else _NARROW


def _saturates() -> bool:
    numbers = torch.full((_PACKED_FOR, 256), 255, dtype=torch.uint8)
    packed = _packed(np.ones((_BLOCK_CENTERS, 256), dtype=np.float32))
    found = _product(numbers, 128, *packed)
    return bool((found - 127 * 256).abs().max() > 1)
