"""Margins that lower the cosines of positives, so that a sample must be nearer to its own classes
than to other classes by the margin.
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
    """Returns the cosines of positives lowered by the margin, in the same shape.

    arcface: cos(theta + m) (Deng et al., CVPR 2019). For theta + m > pi, that is cos theta <
    -cos m, the cosine would rise again, so a line of slope 1 continues it from that point. cosface:
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
    # Expands cos(t + m) instead of calling arccos, whose derivative is infinite at |cos| = 1.
    sines = torch.sqrt((1.0 - cosines * cosines).clamp_min(_MIN_SINE**2))
    rotated = cosines * math.cos(margin) - sines * math.sin(margin)
    # Both are -1 at cos t = -cos m.
    line = cosines + math.cos(margin) - 1.0
    return torch.where(cosines > -math.cos(margin), rotated, line)
