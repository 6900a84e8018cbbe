"""Cluster discrimination with one label (CD), several labels (MLC), and several labels whose
positive and negative terms are separate (MLCD).

Each loss takes the logits of a sample's positive classes [B, P] and of its negative classes [B, N];
-inf marks an absent entry. With LSEn = log sum_j exp(s_j) over negatives and LSEp = log sum_i
exp(-s_i) over positives:

    CD    Eq. 3   softplus(LSEn - s_y)                    = log(1 + N exp(-s_y))
    MLC   Eq. 4   softplus(LSEn + LSEp)                   = log(1 + N P)
    MLCD  Eq. 5   softplus(LSEn) + softplus(LSEp)         = log((1 + N)(1 + P))

N and P are the sums exp(LSEn) and exp(LSEp). The paper prints Eq. 5 as log(1 + NP + N + P); the
factorized sum used here never overflows. Losses are computed in float32 or float64, with autocast
off. With classes sharded over processes, reduce the two log-sums over the processes, then call
`*_from_log_sums`.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Reduction = Literal["mean", "none"]


def cd_loss(
    positive_logits: Tensor, negative_logits: Tensor, *, reduction: Reduction = "mean"
) -> Tensor:
    """Computes Eq. 3 for exactly one positive per sample: [B, 1] and [B, N] to a scalar or [B]."""
    if positive_logits.shape[1] != 1:
        raise ValueError(
            f"cd_loss takes exactly one positive per sample, got {positive_logits.shape[1]}: "
            "use mlc_loss or mlcd_loss"
        )
    return mlc_loss(positive_logits, negative_logits, reduction=reduction)


def mlc_loss(
    positive_logits: Tensor, negative_logits: Tensor, *, reduction: Reduction = "mean"
) -> Tensor:
    """Computes Eq. 4: [B, P] and [B, N] to a scalar or [B]."""
    return _reduce(mlc_from_log_sums(*log_sums(positive_logits, negative_logits)), reduction)


def mlcd_loss(
    positive_logits: Tensor,
    negative_logits: Tensor,
    *,
    bias: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Computes Eq. 5: [B, P] and [B, N] to a scalar or [B].

    bias: constant b added to every logit; the loss is then ZLPR with threshold -b.
    """
    return _reduce(
        mlcd_from_log_sums(*log_sums(positive_logits, negative_logits), bias=bias), reduction
    )


def mlc_from_log_sums(lse_positive: Tensor, lse_negative: Tensor) -> Tensor:
    """Computes Eq. 4 from the log-sums: [B], [B] to [B]. A sample without positives, or without
    negatives, has loss 0.
    """
    return softplus(lse_negative + lse_positive)


def mlcd_from_log_sums(
    lse_positive: Tensor, lse_negative: Tensor, *, bias: float | Tensor = 0.0
) -> Tensor:
    """Computes Eq. 5 from the log-sums: [B], [B] to [B]. Without positives (or negatives), the
    positive (or negative) term is 0.
    """
    return softplus(lse_negative + bias) + softplus(lse_positive - bias)


def log_sums(positive_logits: Tensor, negative_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (LSEp, LSEn), each [B]; -inf for a sample without positives or negatives."""
    with torch.autocast(positive_logits.device.type, enabled=False):
        positive = _promote_to_float32(positive_logits)
        negative = _promote_to_float32(negative_logits)
        absent = positive == -torch.inf
        return _logsumexp((-positive).masked_fill(absent, -torch.inf)), _logsumexp(negative)


def softplus(x: Tensor) -> Tensor:
    """Returns log(1 + exp(x)), exact to float64's last digits."""
    # By default, torch returns x itself above 20, an error of 2e-9; above 40 it is 4e-18.
    return functional.softplus(x, threshold=40.0)


def _logsumexp(logits: Tensor) -> Tensor:
    """Reduces dim 1. A row that is empty or all -inf gets gradient 0, not NaN."""
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0],), -torch.inf)
    all_absent = (logits == -torch.inf).all(dim=1)
    finite = torch.where(all_absent[:, None], torch.zeros_like(logits), logits)
    return torch.logsumexp(finite, dim=1).masked_fill(all_absent, -torch.inf)


def _promote_to_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _reduce(losses: Tensor, reduction: Reduction) -> Tensor:
    return losses.mean() if reduction == "mean" else losses
