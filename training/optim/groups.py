"""The groups of parameters: matrices decay; biases, norms, the class token and positions do not."""

from typing import Any

import torch
from torch import nn

from training.config import OptimConfig
from training.optim.row_adamw import RowAdamW
from training.parallel.partial_fc import PartialFC


def parameter_groups(trunk: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Returns AdamW's groups; each carries `peak_lr`, from which the schedule sets `lr`."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in trunk.named_parameters():
        (decayed if parameter.dim() > 1 and name != "pos" else plain).append(parameter)
    return [
        {"params": decayed, "weight_decay": config.weight_decay, "peak_lr": config.lr},
        {"params": plain, "weight_decay": 0.0, "peak_lr": config.lr},
    ]


def adamw_settings(config: OptimConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": config.betas, "eps": config.eps}


def center_optimizer(centers: PartialFC, config: OptimConfig) -> torch.optim.Optimizer:
    """Returns the optimizer of the class centers, without weight decay.

    Only the centers' direction matters, so decay would merely change their angular learning rate.
    """
    center_lr = config.center_lr or config.lr
    group = {"params": list(centers.parameters()), "weight_decay": 0.0, "peak_lr": center_lr}
    settings = adamw_settings(config) | {"lr": center_lr}
    if centers.config.center_update == "sparse":
        return RowAdamW([group], **settings)
    return torch.optim.AdamW([group], **settings)
