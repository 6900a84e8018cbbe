"""The margins on the cosines of positives: a sample must be nearer to its own classes
by this much.
"""

import math
from typing import Final, Literal

import torch
from torch import Tensor

MarginKind = Literal["arcface", "cosface", "none"]
MarginGrad = Literal["exact", "straight_through"]

_MIN_SINE: Final = 1e-6  # keeps d sqrt(1 - c^2) / dc finite at |c| = 1


def with_margin(
    cosines: Tensor,
    *,
    kind: MarginKind = "arcface",
    margin: float = 0.3,
    grad: MarginGrad = "straight_through",
) -> Tensor:
    """Returns the cosines of positives, lowered by the margin; the shape stays.

    arcface: cos(theta + m) (Deng et al., CVPR 2019). Where theta + m passes pi, below cos theta =
    -cos m, it would rise again, so it goes on as the line of slope 1 through that point. cosface:
    cos theta - m (Wang et al., CVPR 2018). grad: `straight_through` passes the gradient unchanged,
    as the authors' code does; `exact` multiplies it by sin(theta + m) / sin(theta).
    """
    if kind == "none" or margin == 0.0:
        return cosines
    if kind == "cosface":
        return cosines - margin
    lowered = _arcface(cosines, margin)
    return lowered if grad == "exact" else cosines + (lowered - cosines).detach()


def _arcface(cosines: Tensor, margin: float) -> Tensor:
    # cos t cos m - sin t sin m: arccos has an infinite derivative at |cos| = 1.
    sines = torch.sqrt((1.0 - cosines * cosines).clamp_min(_MIN_SINE**2))
    inside = cosines * math.cos(margin) - sines * math.sin(margin)
    # At cos t = -cos m the inside branch is -1; the line of slope 1 through that point continues
    # below.
    beyond = cosines + math.cos(margin) - 1.0
    return torch.where(cosines > -math.cos(margin), inside, beyond)
