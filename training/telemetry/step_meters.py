"""The meters of a step of any training, which the loop checks and logs."""

import math
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


def read_scalars(tensors: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Returns the values of scalar tensors; values that are not finite become None.

    JSON lacks NaN, which a mean over an empty set of positives or negatives is.
    """
    values = {name: tensor.item() for name, tensor in tensors.items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


class StepMeters(Protocol):
    """The read_scalars of a step of any training."""

    @property
    def norms(self) -> dict[str, Tensor]:
        """Returns the loss and the gradient norms, which must be finite."""
        ...

    def to_dict(self) -> dict[str, float | None]: ...


class NotFinite(Exception):
    """The loss or a gradient norm is not finite; raised on all processes.

    Nothing was updated, and the gradients are cleared.
    """

    def __init__(self, meters: StepMeters) -> None:
        super().__init__("not finite")
        self.meters = meters
