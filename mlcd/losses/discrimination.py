"""Cluster discrimination with one label (CD), several (MLC), and several told apart (MLCD).

Each loss takes the logits of a sample's positive classes [B, P] and of its negative classes [B, N];
-inf marks an entry that is absent. With LSEn = log sum_j exp(s_j) over negatives and
LSEp = log sum_i exp(-s_i) over positives:

CD    Eq. 3   softplus(LSEn - s_y)                    = log(1 + N exp(-s_y))
MLC   Eq. 4   softplus(LSEn + LSEp)                   = log(1 + N P)
MLCD  Eq. 5   softplus(LSEn) + softplus(LSEp)         = log((1 + N)(1 + P))

Eq. 5 as printed, log(1 + NP + N + P), is the product form: the factorized sum never overflows.
Computation is in float32 at least, with autocast off.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

Reduction = Literal["mean", "none"]


def cd_loss(positive_logits: Tensor, negative_logits: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Eq. 3, for exactly one positive per sample: [B, 1] and [B, N] to a scalar or [B]."""
    if positive_logits.shape[1] != 1:
        raise ValueError(f"CD knows one positive per sample, got {positive_logits.shape[1]}: use mlc_loss or mlcd_loss")
    return mlc_loss(positive_logits, negative_logits, reduction=reduction)


def mlc_loss(positive_logits: Tensor, negative_logits: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Eq. 4: [B, P] and [B, N] to a scalar or [B]."""
    lse_positive, lse_negative = log_sums(positive_logits, negative_logits)
    return _reduced(softplus(lse_negative + lse_positive), reduction)


def mlcd_loss(
    positive_logits: Tensor, negative_logits: Tensor, *, bias: float = 0.0, reduction: Reduction = "mean"
) -> Tensor:
    """Eq. 5: [B, P] and [B, N] to a scalar or [B]. A `bias` b on every logit makes it ZLPR with threshold -b."""
    lse_positive, lse_negative = log_sums(positive_logits, negative_logits)
    return _reduced(softplus(lse_negative + bias) + softplus(lse_positive - bias), reduction)


def log_sums(positive_logits: Tensor, negative_logits: Tensor) -> tuple[Tensor, Tensor]:
    """(LSEp, LSEn), each [B]; -inf where a sample has no positive or no negative."""
    with torch.autocast(positive_logits.device.type, enabled=False):
        positive, negative = _at_least_float32(positive_logits), _at_least_float32(negative_logits)
        absent = positive == -torch.inf
        return _logsumexp((-positive).masked_fill(absent, -torch.inf)), _logsumexp(negative)


def _logsumexp(logits: Tensor) -> Tensor:
    """Over dim 1, with gradient 0 (not NaN) where every entry is -inf or there is none."""
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0],), -torch.inf)
    nothing = (logits == -torch.inf).all(dim=1)
    safe = torch.where(nothing[:, None], torch.zeros_like(logits), logits)
    return torch.logsumexp(safe, dim=1).masked_fill(nothing, -torch.inf)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _reduced(losses: Tensor, reduction: Reduction) -> Tensor:
    return losses.mean() if reduction == "mean" else losses
