"""The products of rows and centers in eight-bit integers, by oneDNN through torch.

A row x becomes x' = s q: whole numbers q of at most 127 in size and one scale s. The sums of
products of whole numbers are exact. Where the CPU lacks VNNI, oneDNN adds pairs of products in
sixteen bits, which may saturate; there the numbers of the rows stay within 63, so that no pair can.

This module is imported only where torch is installed; the labels are the same without it.
"""

from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.clustering.matmul import Hits, Rounding, entries_above, leading_entries
from mlcd.cores import cpu_features
from mlcd.types import Embeddings

_CENTER_LEVELS: Final = 127
_WIDE, _NARROW = 127, 63  # largest numbers of the rows with and without VNNI
_BLOCK_CENTERS: Final = 4096
_PACKED_FOR: Final = 1024  # rows
_MOST_COMPONENTS: Final = 1 << 15  # int32 holds the sums of twice as many
_NEAR: Final = 1e-3
_TINY: Final = np.float32(1e-30)


class Int8Matmul:
    """The arithmetic of eight-bit integers; see `mlcd.clustering.matmul.Matmul`."""

    name = "torch int8 cpu"
    # Sums are exact. oneDNN shifts the rows to unsigned numbers, subtracts the shift, converts to
    # float32 and scales: a few roundings of numbers of at most 2 D |x'| C', far below this.
    rounding = Rounding(inputs=True, sum_roundoff=2.0**-20, output=2.0**-20)

    def __init__(self, centers_KD: Embeddings, block: int = _BLOCK_CENTERS) -> None:
        self._block = block
        self._row_levels = row_levels()
        self._zero = self._row_levels + 1
        self._blocks = [
            _packed(centers_KD[start : start + self._block])
            for start in range(0, len(centers_KD), self._block)
        ]

    def load(self, rows_BD: Embeddings) -> tuple[Tensor, Tensor]:
        numbers, scales = _quantized(rows_BD, self._row_levels)
        unsigned = (numbers + np.int16(self._zero)).astype(np.uint8)
        return torch.from_numpy(unsigned), torch.from_numpy(scales)

    def rounded(self, rows_BD: Embeddings) -> NDArray[np.floating]:
        numbers, scales = _quantized(rows_BD, self._row_levels)
        return numbers.astype(np.float64) * scales[:, None]

    def rounded_centers(self, centers_CD: Embeddings) -> NDArray[np.floating]:
        numbers, scales = _quantized(centers_CD, _CENTER_LEVELS)
        return numbers.astype(np.float64) * scales[:, None]

    def multiply(self, rows: tuple[Tensor, Tensor], start: int, stop: int) -> Tensor:
        numbers, scales = rows
        packed = self._blocks[start // self._block]
        product_BC = _product(numbers, self._zero, *packed).mul_(scales[:, None])
        return product_BC[:, : stop - start]

    def leaders(self, product_BC: Tensor, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return leading_entries(product_BC.numpy(), k)

    def above(self, product_BC: Tensor, threshold_B: NDArray[np.float32]) -> Hits:
        values_BC = product_BC.numpy()
        rows, columns = entries_above(values_BC, threshold_B)
        return Hits(rows, columns, values_BC[rows, columns])


def _quantized(rows_BD: Embeddings, levels: int) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
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
def computes_int8() -> bool:
    """Tells whether this torch multiplies eight-bit integers as this module takes it to."""
    try:
        return row_levels() == _WIDE or _exact(_NARROW)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


@cache
def row_levels() -> int:
    """Returns the largest number of a row whose sums do not saturate here."""
    return _WIDE if "AVX512_VNNI" in cpu_features() and _exact(_WIDE) else _NARROW


def _exact(levels: int) -> bool:
    """Tells whether sums of the largest products are exact, for rows of either sign."""
    shape = (_PACKED_FOR, 256)
    packed = _packed(np.ones((_BLOCK_CENTERS, shape[1]), dtype=np.float32))
    for sign in (1, -1):
        numbers = torch.full(shape, levels + 1 + sign * levels, dtype=torch.uint8)
        found = _product(numbers, levels + 1, *packed)
        if (found - sign * levels * shape[1]).abs().max() > _NEAR * shape[1]:
            return False
    return True
