"""Instance discrimination without text, the paper's opponent: two views of each photograph.

The loss is softmax or sigmoid. Everything else is the trainer's: the same first weights, samples,
order, steps, learning rate and clipping. The first view is that of cluster discrimination; the
second is another draw of the same augmentation. The passes of both views make a step cost twice as
much. The inverse temperature is learned, as in CLIP and SigLIP, and so is SigLIP's bias, which
starts from -log of the number of negatives.
"""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import normalize

from mlcd.losses.contrastive import clip_loss, siglip_loss
from mlcd.models.servable import Servable
from mlcd.training.config import RunConfig
from mlcd.training.data.dataset import open_dataset
from mlcd.training.data.loader import Batch, Loader, StepBatches
from mlcd.training.optim.groups import adamw_settings, parameter_groups
from mlcd.training.optim.schedule import learning_rate
from mlcd.training.processes import open_processes
from mlcd.training.tower import initial_model

InstanceKind = Literal["instance_softmax", "instance_sigmoid"]

_SECOND_VIEW: Final = 1 << 31  # added to the seed for another stream of the same augmentation
_MAX_SCALE: Final = 100.0  # CLIP's limit
WEIGHTS: Final = "weights"
METRICS: Final = "metrics.jsonl"


class InstanceLoss(nn.Module):
    """The loss of pairs of views, with its learned scalars."""

    def __init__(self, kind: InstanceKind, scale: float, batch_size: int) -> None:
        super().__init__()
        self.kind = kind
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))
        if kind == "instance_sigmoid":
            self.bias = nn.Parameter(torch.tensor(-math.log(batch_size - 1)))

    def forward(self, first_BD: Tensor, second_BD: Tensor) -> Tensor:
        """Returns the loss of unit rows, pair by pair, as a scalar."""
        scale = self.log_scale.exp()
        if self.kind == "instance_softmax":
            return clip_loss(first_BD, second_BD, scale)
        return siglip_loss(first_BD, second_BD, scale, self.bias)

    @torch.no_grad()
    def clamp(self) -> None:
        """Limits the scale after the optimizer's step, as CLIP does."""
        self.log_scale.clamp_(0.0, math.log(_MAX_SCALE))


def train_instances(config: RunConfig, kind: InstanceKind, scale: float) -> Path:
    """Trains, and publishes at `config.out` by rename; returns the directory of the weights.

    An interrupted training starts anew. From `config.data.labels` only the list of photographs is
    used; `config.loss` is not used.
    """
    out = Path(config.out)
    if not (out / WEIGHTS).is_dir():
        draft = out.with_name(out.name + ".partial")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        with open_processes(config.device, config.num_threads) as processes:
            _train(
                config,
                InstanceLoss(kind, scale, config.schedule.batch_size),
                draft,
                processes.device,
            )
        draft.rename(out)
    return out / WEIGHTS


@dataclass
class _Training:
    model: Servable
    loss: InstanceLoss
    optimizer: torch.optim.AdamW


def _train(config: RunConfig, loss: InstanceLoss, draft: Path, device: torch.device) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = initial_model(config.model, config.seed).to(device)
    loss.to(device)
    scalars = {"params": list(loss.parameters()), "weight_decay": 0.0, "peak_lr": config.optim.lr}
    groups = [*parameter_groups(model.trunk, config.optim), scalars]
    training = _Training(model, loss, torch.optim.AdamW(groups, **adamw_settings(config.optim)))
    (draft / "config.yaml").write_text(
        yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    )
    with (
        _view(config, config.seed) as first,
        _view(config, config.seed + _SECOND_VIEW) as second,
        (draft / METRICS).open("w") as log,
    ):
        for views in zip(first, second, strict=True):
            record = _step(training, views, config, device)
            step = views[0].step + 1
            if step % config.log_every == 0 or step == config.schedule.steps:
                log.write(
                    json.dumps(
                        {"step": step, **{name: value.item() for name, value in record.items()}}
                    )
                    + "\n"
                )
                log.flush()
    (draft / WEIGHTS).mkdir()
    model.float().write(draft / WEIGHTS)


def _view(config: RunConfig, crop_seed: int) -> Loader:
    return Loader(open_dataset(config), config, rank=0, size=1, start_step=0, crop_seed=crop_seed)


def _step(
    training: _Training,
    views: tuple[StepBatches[Batch], StepBatches[Batch]],
    config: RunConfig,
    device: torch.device,
) -> dict[str, Tensor]:
    factor = learning_rate(
        views[0].step,
        peak=1.0,
        warmup_steps=config.optim.warmup_steps,
        num_steps=config.schedule.steps,
    )
    for group in training.optimizer.param_groups:
        group["lr"] = factor * group["peak_lr"]
    training.model.train()
    with torch.autocast(device.type, torch.bfloat16, enabled=config.compute.precision == "bf16"):
        first, second = (
            training.model.embed(view.parts[0].images.to(device).float()) for view in views
        )
    first, second = normalize(first.float(), dim=1), normalize(second.float(), dim=1)
    loss = training.loss(first, second)
    training.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    parameters = [
        parameter for group in training.optimizer.param_groups for parameter in group["params"]
    ]
    nn.utils.clip_grad_norm_(
        parameters, config.optim.clip_norm or math.inf, error_if_nonfinite=True
    )
    training.optimizer.step()
    training.loss.clamp()
    return {
        "loss": loss.detach(),
        "scale": training.loss.log_scale.detach().exp(),
        **_cosines(first, second),
    }


@torch.no_grad()
def _cosines(first_BD: Tensor, second_BD: Tensor) -> dict[str, Tensor]:
    cosine_BB = first_BD @ second_BD.T
    positive = cosine_BB.diagonal().mean()
    num = len(cosine_BB)
    negative = (cosine_BB.sum() - positive * num) / max(1, num * (num - 1))
    return {"positive_cosine": positive, "negative_cosine": negative}
