"""Random resized crop and horizontal flip of a batch, drawn from (seed, position in the stream)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from mlcd.randomness import uniform
from training.config import AugmentConfig


def augment(
    images: Tensor, positions: NDArray[np.int64], *, image_size: int, config: AugmentConfig, seed: int
) -> Tensor:
    """uint8 [B, 3, R, R] to float32 [B, 3, image_size, image_size], values 0..255.

    Area uniform in [min_area, 1], aspect ratio log-uniform in [1/max_aspect, max_aspect], place uniform.
    """
    area, aspect, left, top, mirror = (uniform(seed, 1, positions, draw) for draw in range(5))
    area = config.min_area + (1.0 - config.min_area) * area
    ratio = config.max_aspect ** (2.0 * aspect - 1.0)
    width, height = np.minimum(np.sqrt(area * ratio), 1.0), np.minimum(np.sqrt(area / ratio), 1.0)
    # In affine_grid's coordinates the picture spans [-1, 1].
    matrices = np.zeros((len(positions), 2, 3))
    matrices[:, 0, 0] = np.where(mirror < config.flip, -width, width)
    matrices[:, 1, 1] = height
    matrices[:, 0, 2] = (1.0 - width) * (2.0 * left - 1.0)
    matrices[:, 1, 2] = (1.0 - height) * (2.0 * top - 1.0)
    theta = torch.from_numpy(matrices).to(images.device, torch.float32)
    grid = functional.affine_grid(theta, [len(positions), 3, image_size, image_size], align_corners=False)
    return functional.grid_sample(images.float(), grid, mode="bilinear", padding_mode="reflection", align_corners=False)
