"""The losses that can be trained now; rows of others are those of an earlier trainer."""

from typing import get_args

from mlcd.errors import InvalidInput
from mlcd.training.head.loss_config import LossKind


def trainable(kind: str) -> LossKind:
    """Returns a loss as the trainer knows it. Raises InvalidInput if it does not."""
    known: LossKind
    for known in get_args(LossKind):
        if kind == known:
            return known
    raise InvalidInput(
        f"the loss must be one of {', '.join(get_args(LossKind))}, got {kind}",
        remedy="its rows state the commit whose trainer has it: check that out to repeat a run",
    )
