"""Draws the classes that serve as negatives in a step.

The draw depends on (seed, step, class id) and, under `partialfc`, on the global batch's labels. It
never depends on the number of processes or the shard layout. The policies, for k classes and the
ratio r:

    independent  int(r k) classes, uniformly without replacement, regardless of labels: the paper
                 taken literally
    partialfc    the batch's positives, and random classes up to int(r k) in all; only the
                 positives if these are more (insightface; several labels per image can leave
                 no room for random negatives)

The classes with the smallest hashes of (seed, step, class id) are drawn. Each sample's own
positives are masked afterward; other samples' positives are valid negatives.
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
    """Returns the ids of the classes drawn in this step, at least one: int64, ascending.

    ratio: share of the classes to draw; 1 draws all. labels: int64 [B, L] of the global batch,
    required by `partialfc`.
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
            raise ValueError("partialfc requires the labels of the global batch, got None")
        if labels.numel() > quota:
            # The labels can raise the quota only here; reading it waits for the GPU.
            quota = max(quota, int(num_distinct(labels)))
        # Index num_classes absorbs the padding, -1.
        marked_ids = torch.where(labels >= 0, labels, num_classes).flatten()
        marked = torch.cat([hashes, hashes[:1]]).index_fill_(0, marked_ids, _SMALLEST)
        hashes = marked[:num_classes]
    # The host knows the quota, so topk does not wait for the GPU.
    return hashes.topk(quota, largest=False, sorted=False).indices.sort().values


def hash_classes(seed: int, step: int, ids: Tensor) -> Tensor:
    """Returns int64 hashes of the ids, whose signed order equals the unsigned order of the hashes
    that `mlcd.randomness.hash_counters` computes.
    """
    # A CPU scalar: the first rounds launch no GPU kernel; it combines with ids on any device.
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
    """Shifts right, filling with zeros (a logical shift)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def own_slots(drawn: Tensor, labels: Tensor) -> Tensor:
    """Returns the index in `drawn` (ascending ids) of each label, [B, L].

    For a label that was not drawn the index is -1 - len(drawn), which stays negative after a caller
    adds the offset of a chunk.
    """
    not_drawn = -1 - len(drawn)
    if len(drawn) == 0:
        return torch.full_like(labels, not_drawn)
    slots = torch.searchsorted(drawn, labels.clamp_min(0)).clamp_max(len(drawn) - 1)
    return torch.where((drawn[slots] == labels) & (labels >= 0), slots, not_drawn)
