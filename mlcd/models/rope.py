"""The 2-D rotary position embedding of MLCD (the bigG and RICE towers), with a learned angle for
the class token.

Shapes: B batch, H heads, T tokens (class token, registers, patches), D head dimension, R = D / 2
angles per token.

The angles of patch (h, w) are [h * f, w * f], f_t = 10000^(-2t/R) for t = 0..R/2-1. The angles of
the class token are a parameter; those of registers are 0. Each angle rotates the channels t and
t + R (not interleaved), in queries and keys of every block.
"""

from collections.abc import Callable
from typing import Final, Self

import torch
from torch import Tensor, nn

_BASE: Final = 10_000.0


class RotaryPositions(nn.Module):
    """The angles of every token.

    They stay float32 in a model of any dtype: rounding would shift the angles of far patches.
    """

    def __init__(self, head_dim: int, registers: int = 0) -> None:
        super().__init__()
        self.head_dim, self.registers = head_dim, registers
        self.cls_angle = nn.Parameter(torch.empty(1, head_dim // 2))
        self._gpu_angles: dict[tuple[tuple[int, int], torch.device], Tensor] = {}

    def forward(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, each [T, R], for a grid of (rows, columns) of patches."""
        angles = [self.cls_angle, self._patch_angles(grid)]
        if self.registers:
            angles.insert(1, self.cls_angle.new_zeros(self.registers, self.head_dim // 2))
        angle_TR = torch.cat(angles)
        return angle_TR.cos(), angle_TR.sin()

    def _patch_angles(self, grid: tuple[int, int]) -> Tensor:
        """Returns the angles of patches in the dtype and on the device of `cls_angle`.

        Cached on a GPU: a copy from the host would synchronize, which a CUDA graph cannot contain.
        """
        like = self.cls_angle
        if like.device.type != "cuda":
            return patch_angles(grid, self.head_dim).to(like)
        key = grid, like.device
        if key not in self._gpu_angles:
            with torch.inference_mode(mode=False):  # training may follow and needs a normal tensor
                self._gpu_angles[key] = patch_angles(grid, self.head_dim).to(like.detach())
        return self._gpu_angles[key].to(like.dtype)

    def _apply(
        self,
        fn: Callable[[Tensor], Tensor],
        recurse: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Self:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return (
                tensor.to(moved.device) if moved.dtype in {torch.bfloat16, torch.float16} else moved
            )

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        return self


def patch_angles(grid: tuple[int, int], head_dim: int) -> Tensor:
    """Returns the angles of a grid of patches, float64 [rows * columns, R], row-major."""
    num_angles = head_dim // 2
    frequencies = _BASE ** (-torch.arange(0, num_angles, 2, dtype=torch.float64) / num_angles)
    rows, columns = (torch.arange(num, dtype=torch.float64) for num in grid)
    row_angles = torch.outer(rows, frequencies)[:, None].expand(-1, grid[1], -1)
    column_angles = torch.outer(columns, frequencies)[None].expand(grid[0], -1, -1)
    return torch.cat([row_angles, column_angles], dim=2).flatten(0, 1)


def rotate(x_BHTD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotates each pair of channels (t, t + R) of every token by its angle.

    Computes in the dtype of the angles and returns the dtype of x.
    """
    first, second = x_BHTD.to(cos_TR.dtype).chunk(2, dim=-1)
    rotated = torch.cat(
        [first * cos_TR - second * sin_TR, second * cos_TR + first * sin_TR], dim=-1
    )
    return rotated.to(x_BHTD.dtype)
