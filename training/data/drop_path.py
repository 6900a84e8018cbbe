"""Stochastic depth (Huang et al., 2016): draws for which samples a block skips attention or MLP.

The draw depends only on seed, stream position, view and block, so it is the same for any number of
processes and after any interruption.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.randomness import Stream, uniform
from mlcd.training.tower_config import TowerConfig

_BRANCHES = 2  # attention and MLP


def branch_scales(
    config: TowerConfig, positions: NDArray[np.int64], seed: int, view: int = 0
) -> Tensor | None:
    """Returns a factor for each branch of each block, float32 [blocks, 2, b]: 0 if the branch is
    skipped, else 1 / (1 - rate), so that the mean is 1. None if drop_path is 0.
    """
    if config.drop_path == 0.0:
        return None
    rates = drop_rates(config)[:, None, None]
    blocks = np.arange(config.depth)[:, None, None]
    branches = np.arange(view * _BRANCHES, (view + 1) * _BRANCHES)[None, :, None]
    is_kept = uniform(seed, Stream.DROP_PATH, positions[None, None], blocks, branches) >= rates
    return torch.from_numpy((is_kept / (1.0 - rates)).astype(np.float32))


def drop_rates(config: TowerConfig) -> NDArray[np.float64]:
    """Returns each block's rate, rising linearly from 0 to drop_path; 0 for frozen blocks."""
    rates = np.linspace(0.0, config.drop_path, config.depth)
    rates[: config.num_frozen] = 0.0
    return rates
