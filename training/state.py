"""The state that must survive a crash: weights, centers, moments, and three integers."""

from dataclasses import dataclass

import torch
from torch import nn

from mlcd.models.servable import Servable
from training.optim.average import WeightAverage
from training.parallel.backbone import Backbone
from training.parallel.partial_fc import PartialFC


@dataclass
class TrainState:
    """The state of a training.

    step: finished steps; order, negatives, augmentation and learning rate follow from it.
    skipped_steps: steps left out because loss or gradient was not finite. skipped_samples: images
    that could not be used, over all processes. average: that of the tower's weights, if it is asked
    for.
    """

    backbone: Backbone
    centers: PartialFC
    optimizer: torch.optim.AdamW
    center_optimizer: torch.optim.Optimizer
    step: int = 0
    skipped_steps: int = 0
    skipped_samples: int = 0
    average: WeightAverage | None = None

    @property
    def model(self) -> Servable:
        return self.backbone.model

    def replicated(self) -> list[nn.Parameter]:
        """Returns the parameters that are not spread over processes as centers are: those of the
        tower, and a learned scale and bias.
        """
        return [*self.model.trunk.parameters(), *self.centers.scalars.values()]

    def servable(self) -> Servable:
        """Returns the whole model that is evaluated and exported; every process calls it."""
        return self.backbone.replica(None if self.average is None else self.average.weights)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return self.optimizer, self.center_optimizer
