"""Everything that must survive a crash: weights, centers, both optimizers' moments, and one integer."""

from dataclasses import dataclass

import torch

from mlcd.models.servable import Servable
from training.parallel.partial_fc import PartialFC


@dataclass
class TrainState:
    """`step` counts finished updates; order, negatives, augmentation and learning rate follow from it."""

    model: Servable
    centers: PartialFC
    optimizer: torch.optim.AdamW
    center_optimizer: torch.optim.Optimizer
    step: int = 0

    def optimized(self) -> dict[str, tuple[torch.nn.Parameter, torch.optim.Optimizer]]:
        """Every trained parameter by name, with the optimizer that holds its moments."""
        trunk = {
            f"trunk.{name}": (parameter, self.optimizer) for name, parameter in self.model.trunk.named_parameters()
        }
        return {**trunk, "centers.weight": (self.centers.weight, self.center_optimizer)}
