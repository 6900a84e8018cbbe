"""The settings of AdamW."""

from typing import Annotated

from pydantic import Field

from mlcd.training.section import Section

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """The settings of AdamW for the tower and the centers."""

    lr: Annotated[float, Field(gt=0)] = 1e-3
    """The peak of the learning rate; from there it follows a cosine to 0."""
    center_lr: Annotated[float, Field(gt=0)] | None = None
    """The learning rate of the centers. None: the same as lr."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """The weight decay of the tower's matrices; nothing else decays."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.98)
    """The decay of the mean gradient, and of the mean squared gradient."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """The term added to the root of the mean squared gradient."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """The number of steps in which the learning rate rises; at most schedule.steps."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 5.0
    """The largest norm of the gradient of tower and centers together. None: not clipped."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The learning rate of each block relative to that of the block after it; the projection and
    the last norm have lr itself.
    """
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The decay of a moving average of the tower's weights, which is then evaluated and exported;
    at most (1 + n) / (10 + n) after n steps. None: no average.
    """
    max_skips: Annotated[int, Field(ge=0)] = 0
    """Steps without a finite loss and gradient that are skipped before the run stops. Each such
    batch is saved.
    """
