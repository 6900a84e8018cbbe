"""The settings of checkpoints."""

from typing import Annotated

from pydantic import Field

from mlcd.training.section import Section


class CheckpointConfig(Section):
    """The checkpoints that are saved while training."""

    every_steps: Annotated[int, Field(ge=1)] = 100
    """The number of steps between checkpoints."""
    keep_last: Annotated[int, Field(ge=1)] = 1
    """The number of latest checkpoints that are kept, besides step 0 and the final step."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Also keeps the checkpoints whose step is a multiple of this number."""
    asynchronous: bool = True
    """Writes checkpoints while training continues."""
