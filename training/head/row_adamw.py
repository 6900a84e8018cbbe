"""AdamW on the rows that a step touched; other rows and their moments do not change.

Dense AdamW moves every class center at every step: weight decay and stale momentum act on rows
without a gradient. Here each row counts the steps that touched it, for bias correction; decay, too,
applies only in these steps.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mlcd.training.head.partial_fc import PartialFC
from mlcd.training.head.row_gradients import entries
from mlcd.training.optim.groups import adamw_settings
from mlcd.training.optim.optim_config import OptimConfig


def center_optimizer(centers: PartialFC, config: OptimConfig) -> torch.optim.Optimizer:
    """Returns the optimizer of the class centers, without weight decay.

    Only the centers' direction matters, so decay would merely change their angular learning rate.
    """
    center_lr = config.center_lr or config.lr
    group = {"params": [centers.weight], "weight_decay": 0.0, "peak_lr": center_lr}
    settings = adamw_settings(config) | {"lr": center_lr}
    if centers.config.center_update == "sparse":
        return RowAdamW([group], **settings)
    return torch.optim.AdamW([group], **settings)


class RowAdamW(torch.optim.Optimizer):
    """AdamW for parameters [rows, dimension] with sparse gradients of rows, in the form that
    `mlcd.training.head.row_gradients` describes.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["row_steps"] = torch.zeros(
                parameter.shape[0], dtype=torch.int64, device=parameter.device
            )
        assert parameter.grad is not None
        rows, values = entries(parameter.grad)
        # Repeated rows get the value of their first entry, so all of them write the same result.
        values = values[torch.searchsorted(rows, rows)]
        beta1, beta2 = group["betas"]
        steps = state["row_steps"][rows] + 1
        exp_avg = state["exp_avg"][rows].mul_(beta1).add_(values, alpha=1 - beta1)
        exp_avg_sq = state["exp_avg_sq"][rows].mul_(beta2).addcmul_(values, values, value=1 - beta2)
        correction1 = 1 - beta1 ** steps.to(parameter.dtype)
        correction2 = 1 - beta2 ** steps.to(parameter.dtype)
        denominator = exp_avg_sq.sqrt().div_(correction2.sqrt()[:, None]).add_(group["eps"])
        updated_rows = parameter[rows].mul_(1 - group["lr"] * group["weight_decay"])
        updated_rows.sub_(group["lr"] * (exp_avg / correction1[:, None]) / denominator)
        parameter[rows] = updated_rows
        state["exp_avg"][rows], state["exp_avg_sq"][rows], state["row_steps"][rows] = (
            exp_avg,
            exp_avg_sq,
            steps,
        )
