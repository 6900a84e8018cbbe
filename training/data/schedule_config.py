"""The length of a run and the size of its batches."""

from typing import Annotated

from pydantic import Field

from mlcd.training.section import Section


class ScheduleConfig(Section):
    """The length of the run."""

    steps: Annotated[int, Field(ge=1)]
    """The number of updates of the weights."""
    batch_size: Annotated[int, Field(ge=1)] = 128
    """The number of images in a step, over all processes."""
