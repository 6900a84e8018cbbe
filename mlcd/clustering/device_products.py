"""Computes the products of a scan on a device: with Triton kernels on a CUDA GPU, or with torch
operations on a CPU and without Triton.

The results differ only in the order of float32 and float64 sums. Shapes: B rows, K centers, D
dimension, G groups of GROUP centers, T tiles of TILE centers, W chosen for each row.
"""

import threading
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

GROUP: Final = 16  # centers per group; only its largest product is kept
TILE: Final = 256
_BLOCK_CENTERS: Final = 32 * TILE  # multiplied at once
_ENTRIES: Final = 1 << 24  # components gathered at once
_LOCK = threading.Lock()  # a kernel is compiled at its first use


def maxima(rows_BD: Tensor, centers_KD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest product of each row with the centers of each group, float32 [B, T * 16],
    and of each tile, [B, T]; -inf for a group without centers.

    rows, centers: bfloat16. K must be a multiple of GROUP, and D of 64.
    """
    num_tiles = -(-len(centers_KD) // TILE)
    groups_BG = rows_BD.new_empty((len(rows_BD), num_tiles * (TILE // GROUP)), dtype=torch.float32)
    tiles_BT = rows_BD.new_empty((len(rows_BD), num_tiles), dtype=torch.float32)
    if by_kernels(rows_BD.device):
        from mlcd.clustering import device_kernels

        with _LOCK:
            device_kernels.maxima(rows_BD, centers_KD, groups_BG, tiles_BT, GROUP)
        return groups_BG, tiles_BT
    groups_BG.fill_(-torch.inf)
    for start in range(0, len(centers_KD), _BLOCK_CENTERS):
        product_BC = _wide_product(rows_BD, centers_KD[start : start + _BLOCK_CENTERS].T)
        largest = product_BC.unflatten(1, (-1, GROUP)).amax(dim=2)
        groups_BG[:, start // GROUP : start // GROUP + largest.shape[1]] = largest
    torch.amax(groups_BG.unflatten(1, (num_tiles, -1)), dim=2, out=tiles_BT)
    return groups_BG, tiles_BT


def of_members(rows_BD: Tensor, centers_KD: Tensor, chosen_BW: Tensor) -> Tensor:
    """Returns the products of each row with the centers of its chosen groups, float32 [B, W *
    GROUP]; -inf for the centers of group -1.
    """
    products = rows_BD.new_empty((*chosen_BW.shape, GROUP), dtype=torch.float32)
    if by_kernels(rows_BD.device):
        from mlcd.clustering import device_kernels

        with _LOCK:
            device_kernels.of_members(rows_BD, centers_KD, chosen_BW, products)
        return products.flatten(1)
    places = torch.arange(GROUP, device=rows_BD.device)
    members = (chosen_BW.clamp_min(0)[:, :, None] * GROUP + places).flatten(1)
    flat = _gathered_products(rows_BD, centers_KD, members, torch.float32)
    absent = (chosen_BW < 0).repeat_interleave(GROUP, dim=1)
    return flat.masked_fill_(absent, -torch.inf)


def in_float64(rows_BD: Tensor, centers_KD: Tensor, chosen_BW: Tensor) -> Tensor:
    """Returns the float64 product of each float32 row with its chosen centers, [B, W]; -inf for
    center -1.
    """
    if by_kernels(rows_BD.device):
        from mlcd.clustering import device_kernels

        scores_BW = rows_BD.new_empty(chosen_BW.shape, dtype=torch.float64)
        with _LOCK:
            device_kernels.in_float64(rows_BD, centers_KD, chosen_BW, scores_BW)
        return scores_BW
    scores = _gathered_products(rows_BD, centers_KD, chosen_BW.clamp_min(0), torch.float64)
    return scores.masked_fill_(chosen_BW < 0, -torch.inf)


def by_kernels(device: torch.device) -> bool:
    """Returns whether kernels compute on this device."""
    return device.type == "cuda" and find_spec("triton") is not None and _kernels_run(device)


@cache
def _kernels_run(device: torch.device) -> bool:
    """Runs each kernel once, which compiles it; this requires a C compiler."""
    from mlcd.clustering import device_kernels

    rows, centers = (
        torch.ones((num, 64), dtype=torch.bfloat16, device=device) for num in (1, GROUP)
    )
    first = torch.zeros((1, 1), dtype=torch.int64, device=device)
    groups, tiles = (torch.empty((1, num), device=device) for num in (TILE // GROUP, 1))
    try:
        device_kernels.maxima(rows, centers, groups, tiles, GROUP)
        device_kernels.of_members(rows, centers, first, torch.empty((1, 1, GROUP), device=device))
        score = torch.empty((1, 1), dtype=torch.float64, device=device)
        device_kernels.in_float64(rows.float(), centers.float(), first, score)
        return score.item() == tiles.item() == rows.shape[1]
    except Exception as error:  # noqa: BLE001 - from the compiler, the driver or the disk
        reason = str(error).partition("\n")[0]
        warnings.warn(
            f"a GPU finds labels without kernels, which is slower: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def _wide_product(rows_BD: Tensor, centers_DC: Tensor) -> Tensor:
    """Returns the float32 product of bfloat16 matrices."""
    if rows_BD.is_cuda:
        return torch.mm(rows_BD, centers_DC, out_dtype=torch.float32)
    return rows_BD.float() @ centers_DC.float()


def _gathered_products(
    rows_BD: Tensor, centers_KD: Tensor, ids_BW: Tensor, dtype: torch.dtype
) -> Tensor:
    products_BW = rows_BD.new_empty(ids_BW.shape, dtype=dtype)
    num_rows = max(1, _ENTRIES // max(1, ids_BW.shape[1] * rows_BD.shape[1]))
    for start in range(0, len(rows_BD), num_rows):
        part = slice(start, start + num_rows)
        wide = centers_KD[ids_BW[part]].to(dtype)
        products_BW[part] = torch.einsum("bwd,bd->bw", wide, rows_BD[part].to(dtype))
    return products_BW
