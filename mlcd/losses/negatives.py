"""The classes that serve as negatives in a step.

They are a function of (seed, step, class id) and, under `partialfc`, of the global batch's labels;
they never depend on the number of processes or the shard layout. The policies:

    independent  int(r k) classes, uniformly without replacement, blind to labels: the paper
                 taken literally
    partialfc    the batch's positives, filled up to int(r k) uniformly; the positives alone
                 where they are more (insightface; with several labels per image it runs out of
                 random negatives)

A class is drawn when its hash with (seed, step) is among the smallest. Each sample's own positives
are masked afterwards; other samples' positives are legal negatives.
"""

from typing import Final, Literal

import torch
from torch import Tensor

from mlcd.errors import ConfigInvalid
from mlcd.losses.positives import num_distinct
from mlcd.randomness import Stream

NegativePolicy = Literal["independent", "partialfc"]

# SplitMix64, as in mlcd.randomness. torch has no uint64 arithmetic, so wrapping int64 gives the
# same bits.
_GOLDEN: Final = 0x9E3779B97F4A7C15 - 2**64
_MIX_1: Final = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2: Final = 0x94D049BB133111EB - 2**64
_SMALLEST: Final = -(2**63)


def draw_negatives(
    num_classes: int,
    ratio: float,
    *,
    seed: int,
    step: int,
    policy: NegativePolicy = "independent",
    labels: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Returns the ascending int64 ids of the classes drawn in this step; all of them at r = 1.

    labels: int64 [B, L] of the global batch, which `partialfc` needs. At least one class
    is drawn.
    """
    if not 0.0 < ratio <= 1.0:
        raise ConfigInvalid(f"the negative ratio must be in (0, 1], got {ratio}")
    ids = torch.arange(num_classes, device=device)
    quota = max(1, int(ratio * num_classes))
    if quota == num_classes:
        return ids
    hashes = hash_classes(seed, step, ids)
    if policy == "partialfc":
        if labels is None:
            raise ValueError("the policy partialfc needs the labels of the global batch")
        if labels.numel() > quota:
            # Only here the number depends on the labels, so the host reads it.
            quota = max(quota, int(num_distinct(labels)))
        # The last entry takes the padding, -1.
        marked_ids = torch.where(labels >= 0, labels, num_classes).flatten()
        marked = torch.cat([hashes, hashes[:1]]).index_fill_(0, marked_ids, _SMALLEST)
        hashes = marked[:num_classes]
    # Their number is known, so a GPU is not waited for.
    return hashes.topk(quota, largest=False, sorted=False).indices.sort().values


def hash_classes(seed: int, step: int, ids: Tensor) -> Tensor:
    """Returns int64 hashes whose signed order is the unsigned order of
    `mlcd.randomness.hash_counters` of the same counters.
    """
    # on the host, so that a GPU gets no kernels for a single number; it takes it along to the ids
    state = torch.zeros((), dtype=torch.int64)
    for counter in (seed, Stream.NEGATIVES, step, ids):
        state = _mix(state ^ counter)
    return state ^ _SMALLEST


def _mix(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shifts to the right and fills with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def own_slots(drawn: Tensor, labels: Tensor) -> Tensor:
    """Returns where in `drawn` (ascending ids) each label [B, L] is.

    A label that is not drawn is at -1 - len(drawn), before the first of any chunk.
    """
    nowhere = -1 - len(drawn)
    if len(drawn) == 0:
        return torch.full_like(labels, nowhere)
    slots = torch.searchsorted(drawn, labels.clamp_min(0)).clamp_max(len(drawn) - 1)
    return torch.where((drawn[slots] == labels) & (labels >= 0), slots, nowhere)
