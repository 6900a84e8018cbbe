"""The meters of a step, whatever is trained: what the loop judges a step by and logs."""

import math
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


def numbers(tensors: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Returns the values of scalar tensors; one that is not finite is None.

    JSON cannot express NaN, which the mean over an empty set of positives or negatives is.
    """
    values = {name: tensor.item() for name, tensor in tensors.items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


class StepMeters(Protocol):
    """The numbers of a step of any training."""

    @property
    def norms(self) -> dict[str, Tensor]:
        """Returns the loss and the gradient norms, by which a step is judged."""
        ...

    def to_dict(self) -> dict[str, float | None]: ...


class NotFinite(Exception):
    """Loss or gradient is not finite, on all processes alike.

    Nothing was updated, and the gradients are dropped.
    """

    def __init__(self, meters: StepMeters) -> None:
        super().__init__("not finite")
        self.meters = meters
