"""The learning rate as a function of the step, so no state is saved."""

import math
from collections.abc import Iterable

import torch

from mlcd.training.optim.optim_config import OptimConfig


def learning_rate(step: int, *, peak: float, warmup_steps: int, num_steps: int) -> float:
    """Returns the learning rate of a step.

    It rises linearly from peak / warmup_steps at step 0 to `peak`, then follows half a cosine to 0
    at `num_steps`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(
    optimizers: Iterable[torch.optim.Optimizer], config: OptimConfig, *, step: int, num_steps: int
) -> float:
    """Sets the learning rate of every parameter group; returns the rate for `optim.lr`."""
    factor = learning_rate(
        step,
        peak=1.0,
        warmup_steps=config.warmup_steps,
        num_steps=num_steps,
    )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak_lr"]
    return factor * config.lr
