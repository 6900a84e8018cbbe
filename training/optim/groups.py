"""Which parameters decay: matrices do, biases, norms, the class token and positions do not."""

from typing import Any

from torch import nn

from training.config import OptimConfig


def parameter_groups(trunk: nn.Module, centers: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """AdamW's groups; each carries `peak_lr`, from which the schedule sets `lr`."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in trunk.named_parameters():
        (decayed if parameter.dim() > 1 and name != "pos" else plain).append(parameter)
    center_lr = config.center_lr or config.lr
    return [
        {"params": decayed, "weight_decay": config.weight_decay, "peak_lr": config.lr},
        {"params": plain, "weight_decay": 0.0, "peak_lr": config.lr},
        # Only the direction of a center matters, so decay would merely change its angular learning rate.
        {"params": list(centers.parameters()), "weight_decay": 0.0, "peak_lr": center_lr},
    ]
