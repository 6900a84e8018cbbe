"""Kernels of a scan on a CUDA GPU, in Triton, which is part of PyTorch's CUDA builds.

A library's matrix product writes every score, and reading the scores again takes half as long as
the product. These kernels keep scores in registers, write only maxima, and skip groups without
centers. `mlcd.clustering.device_products` says what each kernel computes.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_OLDER: Final = {"BLOCK_ROWS": 128, "BLOCK_DIMENSION": 32, "num_warps": 8, "num_stages": 3}
# Chosen on an H200: 87 % of its measured limit; its asynchronous copies would gain 1 %.
_HOPPER: Final = {"BLOCK_ROWS": 128, "BLOCK_DIMENSION": 64, "num_warps": 8, "num_stages": 4}
_HOPPER_BYTES: Final = 192 << 10  # of shared memory: 4 stages of 64 components of 384 rows
_ROWS_TOGETHER: Final = 8  # blocks of rows that share a tile of centers in the cache
_LOADED: Final = 256  # components at once


@triton.jit(do_not_specialize=["num_rows", "num_centers", "num_groups", "num_tiles"])
def _maxima(
    rows,
    centers,
    groups,
    tiles,
    num_rows,
    num_centers,
    num_groups,
    num_tiles,
    DIMENSION: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIMENSION: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    # neighboring programs share a tile of centers: TOGETHER blocks of rows, then the next tile
    number = tl.program_id(0)
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    tile_blocks = TOGETHER * num_tiles
    first = number // tile_blocks * TOGETHER
    height = min(num_blocks - first, TOGETHER)
    block = first + number % tile_blocks % height
    tile = number % tile_blocks // height
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    center = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    component = tl.arange(0, BLOCK_DIMENSION)
    # out-of-range rows and centers wrap around; their results are dropped
    row_at = rows + (row % num_rows)[:, None] * DIMENSION + component[None, :]
    center_at = centers + (center % num_centers)[None, :] * DIMENSION + component[:, None]
    product = tl.zeros((BLOCK_ROWS, TILE), dtype=tl.float32)
    for _ in range(0, DIMENSION, BLOCK_DIMENSION):
        product = tl.dot(tl.load(row_at), tl.load(center_at), product)
        row_at += BLOCK_DIMENSION
        center_at += BLOCK_DIMENSION
    largest = tl.max(tl.reshape(product, (BLOCK_ROWS, TILE // GROUP, GROUP)), axis=2)
    group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    largest = tl.where((group < num_groups)[None, :], largest, float("-inf"))
    wide = row.to(tl.int64)
    group_at = groups + wide[:, None] * (num_tiles * (TILE // GROUP)) + group[None, :]
    tl.store(group_at, largest, mask=(row < num_rows)[:, None])
    tl.store(tiles + wide * num_tiles + tile, tl.max(largest, axis=1), mask=row < num_rows)


@triton.jit
def _of_members(
    rows,
    centers,
    chosen,
    products,
    EACH: tl.constexpr,
    DIMENSION: tl.constexpr,
    GROUP: tl.constexpr,
    LOADED: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64)
    group = tl.load(chosen + number)
    member = tl.arange(0, GROUP)
    total = tl.zeros((GROUP,), dtype=tl.float32)
    if group >= 0:
        for start in range(0, DIMENSION, LOADED):
            component = start + tl.arange(0, LOADED)
            in_range = component < DIMENSION
            row = tl.load(rows + number // EACH * DIMENSION + component, mask=in_range, other=0.0)
            center_at = centers + (group * GROUP + member)[:, None] * DIMENSION + component[None, :]
            center = tl.load(center_at, mask=in_range[None, :], other=0.0)
            total += tl.sum(row.to(tl.float32)[None, :] * center.to(tl.float32), axis=1)
    else:
        total += float("-inf")
    tl.store(products + number * GROUP + member, total)


@triton.jit
def _in_float64(
    rows,
    centers,
    chosen,
    scores,
    EACH: tl.constexpr,
    DIMENSION: tl.constexpr,
    LOADED: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64)
    center = tl.load(chosen + number)
    total = tl.zeros((LOADED,), dtype=tl.float64)
    if center >= 0:
        for start in range(0, DIMENSION, LOADED):
            component = start + tl.arange(0, LOADED)
            in_range = component < DIMENSION
            row = tl.load(rows + number // EACH * DIMENSION + component, mask=in_range, other=0.0)
            values = tl.load(centers + center * DIMENSION + component, mask=in_range, other=0.0)
            total += row.to(tl.float64) * values.to(tl.float64)
        tl.store(scores + number, tl.sum(total, axis=0))
    else:
        tl.store(scores + number, float("-inf"))


def maxima(
    rows_BD: Tensor, centers_KD: Tensor, groups_BG: Tensor, tiles_BT: Tensor, group: int
) -> None:
    num_rows, dimension = rows_BD.shape
    num_tiles = tiles_BT.shape[1]
    tile = group * groups_BG.shape[1] // num_tiles
    shape: dict[str, Any] = _OLDER
    if rows_BD.is_cuda:
        properties: Any = torch.cuda.get_device_properties(rows_BD.device)
        if properties.shared_memory_per_block_optin >= _HOPPER_BYTES:
            shape = _HOPPER
    num_blocks = triton.cdiv(num_rows, shape["BLOCK_ROWS"])
    _maxima[(num_blocks * num_tiles,)](
        *(rows_BD, centers_KD, groups_BG, tiles_BT, num_rows, len(centers_KD)),
        *(len(centers_KD) // group, num_tiles, dimension, group, tile),
        TOGETHER=_ROWS_TOGETHER,
        **shape,
    )


def of_members(
    rows_BD: Tensor, centers_KD: Tensor, chosen_BW: Tensor, products_BWE: Tensor
) -> None:
    num_each, dimension, group = chosen_BW.shape[1], rows_BD.shape[1], products_BWE.shape[2]
    _of_members[(chosen_BW.numel(),)](
        rows_BD, centers_KD, chosen_BW, products_BWE, num_each, dimension, group, _LOADED
    )


def in_float64(rows_BD: Tensor, centers_KD: Tensor, chosen_BW: Tensor, scores_BW: Tensor) -> None:
    num_each, dimension = chosen_BW.shape[1], rows_BD.shape[1]
    _in_float64[(chosen_BW.numel(),)](
        rows_BD, centers_KD, chosen_BW, scores_BW, num_each, dimension, _LOADED
    )
