"""The settings of AdamW."""

from typing import Annotated

from pydantic import Field

from mlcd.training.section import Section

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """The settings of AdamW for the tower and the centers."""

    lr: Annotated[float, Field(gt=0)] = 1e-3
    """The peak learning rate, after warm-up; then it decays to 0 along a cosine."""
    center_lr: Annotated[float, Field(gt=0)] | None = None
    """The learning rate of the centers. None: the same as lr."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """The weight decay of the tower's matrices; no other parameters decay."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.98)
    """The decay of the mean gradient, and of the mean squared gradient."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """The term added to the root of the mean squared gradient."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """The number of steps in which the learning rate rises; at most schedule.steps."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 5.0
    """The largest joint gradient norm of tower and centers. None: not clipped."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The learning rate of each block relative to the next block's; the projection and the last
    norm use lr.
    """
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The decay of a moving average of the tower's weights, which is evaluated and exported instead
    of them. The decay is capped at (1 + n) / (10 + n) after n steps. None: no average.
    """
    max_skips: Annotated[int, Field(ge=0)] = 0
    """The number of steps with a non-finite loss or gradient that are skipped before the run
    stops. Each such batch is saved.
    """
