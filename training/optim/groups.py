"""AdamW's parameter groups: weight decay applies to matrices only, not to registers and positions.

With optim.layer_decay each layer has its own learning rate.
"""

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from mlcd.models.text import TextTower
from mlcd.models.vit import ViT
from mlcd.training.optim.optim_config import OptimConfig
from mlcd.training.tower import layer_of

_TOKENS: Final = ("pos", "rope.cls_angle", "registers")


def parameter_groups(trunk: ViT, config: OptimConfig) -> list[dict[str, Any]]:
    """Returns AdamW's groups; each carries `peak_lr`, from which the schedule sets `lr`.

    Frozen parameters are in no group.
    """
    depth = trunk.config.depth
    # AdamW requires a group even if the whole tower is frozen.
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
    """Returns AdamW's groups of a text tower: weight decay for all matrices except positions."""
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
    """Returns the group of learned scale and bias, with the centers' learning rate; [] if none."""
    if not scalars:
        return []
    rate = config.center_lr or config.lr
    return [{"params": list(scalars.values()), "weight_decay": 0.0, "peak_lr": rate}]


def adamw_settings(config: OptimConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": config.betas, "eps": config.eps}
