"""The products of rows and centers by torch on the CPU: float32, or bfloat16 where the hardware
multiplies it faster.

This module is imported only where torch is installed; the labels are the same without it.
"""

import threading
import warnings
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.clustering.matmul import Hits, Loaded, Rounding, Sums, entries_above, lengths, reached_by
from mlcd.clustering.shift import mean_of, offsets, shifted
from mlcd.types import Embeddings

_BLOCK_CENTERS: Final = 4096  # rounded at once
# bfloat16 keeps 8 bits: storing a product moves it by less than 2^-8 of itself.
_BF16_OUTPUT: Final = 2.0**-8


class TorchMatmul:
    """The arithmetic of torch; see `mlcd.clustering.matmul.Matmul`."""

    def __init__(self, centers_KD: Embeddings, *, bf16: bool) -> None:
        keep_float32_exact()
        self._bf16 = bf16
        self._dtype = torch.bfloat16 if bf16 else torch.float32
        self.shift = mean_of(centers_KD) if bf16 else None
        self._centers_KD = torch.empty(centers_KD.shape, dtype=self._dtype)
        for start in range(0, len(centers_KD), _BLOCK_CENTERS):
            block = slice(start, start + _BLOCK_CENTERS)
            self._centers_KD[block] = torch.from_numpy(self._shifted(centers_KD[block]))
        self._memory = threading.local()  # one scan may serve several threads
        self.name = f"torch {'bf16' if bf16 else 'fp32'} cpu"
        # 2^-23, not 2^-24: tensor cores and AVX512_BF16 may truncate their float32 sums.
        self.rounding = Rounding(
            inputs=bf16, sum_roundoff=2.0**-23, output=_BF16_OUTPUT if bf16 else 0.0
        )

    def load(self, rows_BD: Embeddings) -> Loaded:
        rows = torch.from_numpy(rows_BD).to(self._dtype)
        offset_B, error_B = np.zeros((2, len(rows_BD)))
        if self.shift is not None:
            error_B = lengths((torch.from_numpy(rows_BD) - rows.float()).numpy())
            offset_B = offsets(rows_BD, self.shift)
        length_B = lengths(rows.float().numpy())
        return Loaded(rows, length_B, error_B, offset_B)

    def rounded_centers(self, centers_CD: Embeddings) -> NDArray[np.floating]:
        centers = torch.from_numpy(self._shifted(centers_CD)).to(self._dtype)
        rounded: NDArray[np.floating] = centers.double().numpy()
        return rounded

    def _shifted(self, centers_CD: Embeddings) -> Embeddings:
        return centers_CD if self.shift is None else shifted(centers_CD, self.shift)

    def multiply(self, rows: Tensor, start: int, stop: int) -> Tensor:
        shape = (len(rows), stop - start)
        return torch.matmul(
            rows, self._centers_KD[start:stop].T, out=self._buffer(shape[0] * shape[1]).view(shape)
        )

    def _buffer(self, size: int) -> Tensor:
        """Returns memory that is reused: fresh pages for every block would cost a tenth of the
        product.
        """
        held: Tensor | None = getattr(self._memory, "held", None)
        if held is None or len(held) < size:
            held = self._memory.held = torch.empty(size, dtype=self._dtype)
        return held[:size]

    def reached(self, product_BC: Tensor, k: int) -> NDArray[np.float32]:
        return reached_by(product_BC.float().numpy(), k)

    def above(self, product_BC: Tensor, threshold_B: NDArray[np.float32]) -> Hits:
        rows, columns = entries_above(*self._comparable(product_BC, threshold_B))
        found = torch.from_numpy(rows), torch.from_numpy(columns)
        return Hits(rows, columns, product_BC[found].float().numpy())

    def sums(self, rows: Tensor, start: int, stop: int) -> Sums:
        return Sums.of_products(self.multiply(rows, start, stop).float().numpy())

    def compiled(self) -> "TorchMatmul":
        return self

    def _comparable(
        self, product_BC: Tensor, threshold_B: NDArray[np.float32]
    ) -> tuple[NDArray[np.number], NDArray[np.number]]:
        """Returns products [B, C] and thresholds [B] in a type in which `>` decides as it does for
        the exact values.
        """
        if self._bf16 and threshold_B.min(initial=0.0) >= 0:
            # Bits of bfloat16, read as integers, keep the order of values that are not negative and
            # put all others below them. As int16 they are compared faster. Cutting the threshold's
            # lower bits moves it past no product. Adding 0 turns -0.0 into 0.0.
            bits_B = ((threshold_B + np.float32(0)).view(np.uint32) >> 16).astype(np.int16)
            return product_BC.view(torch.int16).numpy(), bits_B
        # Both are exact in float32, so comparing in the product's dtype would round the threshold.
        return product_BC.float().numpy(), threshold_B


def cuda_available() -> bool:
    """Tells whether torch can use a GPU here that multiplies bfloat16."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def keep_float32_exact() -> None:
    """Forbids reduced float32 sums, for which the error bounds do not hold."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")


# torch warns once of arrays that must not be written to, such as a file's
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.broadcast_to(np.float32(0), (1,)))
