"""The settings of AdamW."""

from typing import Annotated

from pydantic import Field

from training.section import Section

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """The settings of AdamW for the tower and the centers."""

    lr: Annotated[float, Field(gt=0)] = 1e-3
    """The peak of the learning rate, after the warm-up. From there it follows a cosine to 0."""
    center_lr: Annotated[float, Field(gt=0)] | None = None
    """The learning rate of the centers. None: the same as lr."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """The weight decay of the tower's matrices. Biases, norms, tokens, positions and the centers do
    not decay.
    """
    betas: tuple[_Beta, _Beta] = (0.9, 0.98)
    """The decay of the mean gradient, and of the mean squared gradient."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """The term added to the root of the mean squared gradient, by which the update is divided."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """The number of steps in which the learning rate rises; at most schedule.steps."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 5.0
    """The largest norm of the gradient of tower and centers together. None: not clipped."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The learning rate of each block relative to that of the block after it. The projection and
    the last norm have lr itself, what comes before the blocks the lowest rate.
    """
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The decay of a moving average of the tower's weights, which is then what is evaluated and
    exported. It is at most (1 + n) / (10 + n) after n steps, so that early weights are forgotten.
    None: without an average.
    """
    max_skips: Annotated[int, Field(ge=0)] = 0
    """The number of steps with a loss or gradient that is not finite that may be skipped before the
    run stops. Each such batch is saved.
    """
