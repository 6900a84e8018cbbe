"""The state of a training on pairs: both towers, the scale and bias, and AdamW's moments."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize

from mlcd.losses.contrastive import clip_loss, siglip_loss
from mlcd.models.servable import Servable
from mlcd.models.text import TextTower
from mlcd.training.data.colors import draw_colors
from mlcd.training.data.device_copies import DeviceCopies
from mlcd.training.data.drop_path import branch_scales
from mlcd.training.data.recoloring import recolor
from mlcd.training.optim.average import WeightAverage
from mlcd.training.optim.groups import adamw_settings, parameter_groups, text_groups
from mlcd.training.pairs.pair_batches import PairBatch
from mlcd.training.pairs.pairs_config import MAX_LOG_SCALE, PairsConfig
from mlcd.training.parallel.backbone import Backbone, TextBackbone
from mlcd.training.processes import Processes
from mlcd.training.tower import freeze
from mlcd.world import World


@dataclass
class PairState:
    """The state of a training on pairs.

    model: image tower, frozen or not. images: the same tower in the form that a step uses; None if
    embeddings are read instead. scalars: log_scale, and bias for siglip. averages: moving average
    of each trained tower's weights; empty without optim.ema. step, skipped_steps, skipped_samples,
    copies: as in `mlcd.training.head.state.TrainState`.
    """

    model: Servable
    images: Backbone | None
    texts: TextBackbone
    scalars: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW
    averages: dict[str, WeightAverage] = field(default_factory=dict)
    step: int = 0
    skipped_steps: int = 0
    skipped_samples: int = 0
    copies: DeviceCopies = field(default_factory=lambda: DeviceCopies(torch.device("cpu")))

    @property
    def world(self) -> World:
        return self.texts.world

    @property
    def device(self) -> torch.device:
        return self.scalars["log_scale"].device

    @property
    def towers(self) -> dict[str, nn.Module]:
        """Returns both towers, by name."""
        return {"image": self.model.trunk, "text": self.texts.trunk}

    def iterate_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the trained parameters with their names."""
        for tower, trunk in self.towers.items():
            for name, parameter in trunk.named_parameters():
                if parameter.requires_grad:
                    yield f"{tower}.{name}", parameter
        for name, parameter in self.scalars.items():
            yield f"scalar.{name}", parameter

    @property
    def trains_images(self) -> bool:
        """True if any parameter of the image tower is trained."""
        return any(parameter.requires_grad for parameter in self.model.trunk.parameters())

    def embed_images(self, batches: Sequence[PairBatch], config: PairsConfig) -> Iterator[Tensor]:
        """Yields the unit image embeddings of each micro-batch, [b, D]."""
        copies = self.copies.iter_on_device([batch.images for batch in batches])
        for batch, copied in zip(batches, copies, strict=True):
            images = copied.float()
            if self.images is not None:
                images = embed_crops(self.images, images, batch.positions, config)
            yield _normalize_rows(images).to(self.scalars["log_scale"].dtype)

    def embed_texts(self, batch: PairBatch) -> Tensor:
        """Returns the unit text embeddings of a micro-batch, [b, D]."""
        return _normalize_rows(self.texts.embed(batch.ids.to(self.device, non_blocking=True)))

    def loss(self, images: Tensor, texts: Tensor) -> Tensor:
        """Computes the loss over all processes' pairs, from this process's unit embeddings."""
        scale, bias = self.scalars["log_scale"].exp(), self.scalars.get("bias")
        if bias is None:
            return clip_loss(images, texts, scale, world=self.world)
        return siglip_loss(images, texts, scale, bias, world=self.world)

    def accumulating(self) -> AbstractContextManager[object]:
        """A context for every micro-batch but a step's last: DDP does not sum gradients in it."""
        stack = ExitStack()
        for tower in (self.images, self.texts):
            if tower is not None:
                stack.enter_context(tower.accumulating())
        return stack

    @torch.no_grad()
    def clamp(self) -> None:
        """Clamps the scale to between 1 and 100, as CLIP does after each update."""
        self.scalars["log_scale"].clamp_(0.0, MAX_LOG_SCALE)

    def average(self) -> None:
        """Updates the moving averages with the weights after an update."""
        for tower, average in self.averages.items():
            average.update(self.towers[tower], self.step)


def embed_crops(
    tower: Backbone, crops: Tensor, positions: NDArray[np.int64], config: PairsConfig
) -> Tensor:
    """Returns embeddings, not normalized, of uint8 crops on the tower's device.

    positions: in the stream; decide the changes of color and the skipped branches.
    """
    colors = draw_colors(positions, config.augment, config.seed, 0)
    pixels = crops if colors is None else recolor(crops.float(), colors)
    scales = branch_scales(config.model, positions, config.seed)
    return tower.embed(pixels, None if scales is None else scales.to(pixels))


def initial_state(
    config: PairsConfig,
    processes: Processes,
    model: Servable,
    text: TextTower,
    scalars: dict[str, float],
) -> PairState:
    """Builds the state at step 0 from two towers and the initial values of the scalars."""
    compute, device = config.compute, processes.device
    text = text.to(device).train()
    options: dict[str, Any] = {"recompute": compute.recompute, "compiled": compute.compile}
    freeze(model.trunk, config.model)
    images = None
    if not config.cached:
        model = model.to(device)
        images = Backbone(model, processes.world, precision=compute.precision, **options)
    texts = TextBackbone(text, processes.world, precision=compute.precision, **options)
    dtype = torch.float64 if compute.precision == "fp64" else torch.float32
    learned = {
        name: nn.Parameter(torch.tensor(value, dtype=dtype, device=device))
        for name, value in scalars.items()
    }
    groups = parameter_groups(model.trunk, config.optim) + text_groups(text, config.optim)
    # Scalars never decay.
    groups.append(
        {"params": list(learned.values()), "weight_decay": 0.0, "peak_lr": config.optim.lr}
    )
    optimizer = torch.optim.AdamW(groups, **adamw_settings(config.optim))
    state = PairState(model, images, texts, learned, optimizer, copies=DeviceCopies(device))
    if config.optim.ema is not None:
        for tower, trunk in state.towers.items():
            if tower == "text" or state.trains_images:
                state.averages[tower] = WeightAverage.of(trunk, config.optim.ema)
    return state


def _normalize_rows(rows: Tensor) -> Tensor:
    return normalize(rows if rows.dtype == torch.float64 else rows.float(), dim=1)
