"""The state that must survive a crash: weights, centers, moments, and three integers."""

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from mlcd.models.servable import Servable
from mlcd.training.data.device_copies import DeviceCopies
from mlcd.training.head.partial_fc import PartialFC
from mlcd.training.optim.average import WeightAverage
from mlcd.training.parallel.backbone import Backbone

_HOST: Final = torch.device("cpu")


@dataclass
class TrainState:
    """The state of a training.

    step: number of finished steps; order, negatives, augmentation and learning rate depend on it.
    skipped_steps: number of steps skipped because loss or gradient was not finite. skipped_samples:
    number of images that could not be decoded, over all processes. average: moving average of the
    tower's weights; None without optim.ema. copies: copies batches to the device.
    """

    backbone: Backbone
    head: PartialFC
    optimizer: torch.optim.AdamW
    center_optimizer: torch.optim.Optimizer
    step: int = 0
    skipped_steps: int = 0
    skipped_samples: int = 0
    average: WeightAverage | None = None
    copies: DeviceCopies = field(default_factory=lambda: DeviceCopies(_HOST))

    @property
    def model(self) -> Servable:
        return self.backbone.model

    @property
    def device(self) -> torch.device:
        return next(self.model.trunk.parameters()).device

    @property
    def sharded(self) -> list[nn.Parameter]:
        """Returns the parameters that are sharded: each process owns different rows."""
        return [self.head.weight]

    @property
    def replicated(self) -> list[nn.Parameter]:
        """Returns the parameters that are not sharded like the centers: the tower, and a learned
        scale and bias.
        """
        return [*self.model.trunk.parameters(), *self.head.scalars.values()]

    def servable(self) -> Servable:
        """Returns the model to evaluate and export, with averaged weights if there are any.

        Every process calls it.
        """
        return self.backbone.replica(None if self.average is None else self.average.weights)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer, self.center_optimizer]
