"""The groups of parameters: matrices decay; biases, norms, the class token, registers and positions
do not.

Each layer has a learning rate of its own with optim.layer_decay.
"""

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from mlcd.models.text import TextTower
from mlcd.models.vit import VisionTower
from mlcd.training.optim.optim_config import OptimConfig
from mlcd.training.tower import layer_of

_TOKENS: Final = ("pos", "rope.cls_angle", "registers")


def parameter_groups(trunk: VisionTower, config: OptimConfig) -> list[dict[str, Any]]:
    """Returns AdamW's groups; each carries `peak_lr`, from which the schedule sets `lr`.

    Frozen parameters are in none of them.
    """
    depth = trunk.config.depth
    # AdamW wants a group even where the whole tower is frozen.
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(config.lr, True): []}
    for name, parameter in trunk.named_parameters():
        if parameter.requires_grad:
            rate = config.lr * config.layer_decay ** (depth + 1 - layer_of(name, depth))
            decays = parameter.dim() > 1 and name not in _TOKENS
            groups.setdefault((rate, decays), []).append(parameter)
    # The matrices come first.
    return [
        {
            "params": groups[rate, decays],
            "weight_decay": config.weight_decay if decays else 0.0,
            "peak_lr": rate,
        }
        for rate, decays in sorted(groups, reverse=True)
    ]


def text_groups(trunk: TextTower, config: OptimConfig) -> list[dict[str, Any]]:
    """Returns AdamW's groups of a text tower, in which all matrices decay but positions."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in trunk.named_parameters():
        decays = parameter.dim() > 1 and name not in _TOKENS
        (matrices if decays else vectors).append(parameter)
    decay = config.weight_decay
    return [
        {"params": matrices, "weight_decay": decay, "peak_lr": config.lr},
        {"params": vectors, "weight_decay": 0.0, "peak_lr": config.lr},
    ]


def scalar_groups(scalars: Mapping[str, nn.Parameter], config: OptimConfig) -> list[dict[str, Any]]:
    """Returns the group of a learned scale and bias, if there are any, at the centers' rate."""
    if not scalars:
        return []
    rate = config.center_lr or config.lr
    return [{"params": list(scalars.values()), "weight_decay": 0.0, "peak_lr": rate}]


def adamw_settings(config: OptimConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": config.betas, "eps": config.eps}
