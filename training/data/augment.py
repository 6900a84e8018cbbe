"""Random resized crop and horizontal flip of a batch, drawn from (seed, position in the stream)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from mlcd.randomness import uniform
from training.config import AugmentConfig


def augment(
    images: Tensor,
    aspects: Tensor,
    positions: NDArray[np.int64],
    *,
    image_size: int,
    config: AugmentConfig,
    seed: int,
) -> Tensor:
    """Whole pictures squashed to squares, [B, 3, R, R], to crops [B, 3, image_size, image_size], values 0..255.

    Area uniform in [min_area, 1] and aspect ratio log-uniform in [1/max_aspect, max_aspect], both of the box in the
    picture before it was squashed, whose width / height is in `aspects` [B]; place uniform. A box that would reach
    beyond the picture is cut to its width or height. float64 images stay float64, others become float32. A sample's
    result depends on its own position only, not on the batch that it comes in.
    """
    boxes = _boxes(aspects.cpu().numpy(), positions, config, seed)
    dtype = torch.float64 if images.dtype == torch.float64 else torch.float32
    # Not affine_grid: its matrix product may round differently in a batch of another size.
    scale_x, scale_y, shift_x, shift_y = torch.from_numpy(boxes).to(images.device, dtype)[:, :, None, None]
    centers = (2 * torch.arange(image_size, device=images.device, dtype=dtype) + 1) / image_size - 1
    shape = (len(positions), image_size, image_size)
    grid_x = (scale_x * centers[None, None, :] + shift_x).expand(shape)
    grid_y = (scale_y * centers[None, :, None] + shift_y).expand(shape)
    grid = torch.stack([grid_x, grid_y], dim=-1)
    return functional.grid_sample(
        images.to(dtype), grid, mode="bilinear", padding_mode="reflection", align_corners=False
    )


def _boxes(
    aspects: NDArray[np.floating], positions: NDArray[np.int64], config: AugmentConfig, seed: int
) -> NDArray[np.float64]:
    """Half width (negative where mirrored), half height, center x and y of each box, [4, B].

    The picture spans [-1, 1] in both directions, whatever its aspect.
    """
    area, aspect, left, top, mirror = (uniform(seed, 1, positions, draw) for draw in range(5))
    area = config.min_area + (1.0 - config.min_area) * area
    ratio = config.max_aspect ** (2.0 * aspect - 1.0) / aspects.astype(np.float64)
    width, height = np.minimum(np.sqrt(area * ratio), 1.0), np.minimum(np.sqrt(area / ratio), 1.0)
    return np.stack(
        [
            np.where(mirror < config.flip, -width, width),
            height,
            (1.0 - width) * (2.0 * left - 1.0),
            (1.0 - height) * (2.0 * top - 1.0),
        ]
    )
