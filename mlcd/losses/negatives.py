"""Which classes serve as negatives in a step.

`independent` (method of the paper, taken literally): a class is drawn when its hash with (seed, step) falls
among the smallest r k. The draw knows nothing of labels, ranks or batches, so any number of ranks sees the
same set; each sample's own positives are masked afterwards.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.errors import ConfigInvalid
from mlcd.randomness import hash_counters


def independent_negatives(num_classes: int, ratio: float, *, seed: int, step: int) -> NDArray[np.int64]:
    """Ascending ids of int(r k) classes (at least 1), drawn uniformly without replacement; all of them at r = 1."""
    if not 0.0 < ratio <= 1.0:
        raise ConfigInvalid(f"the negative ratio must be in (0, 1], got {ratio}")
    if ratio == 1.0:
        return np.arange(num_classes)
    num_drawn = max(1, int(ratio * num_classes))
    hashes = hash_counters(seed, step, np.arange(num_classes))
    return np.sort(np.argpartition(hashes, num_drawn - 1)[:num_drawn])


def mask_own_positives(negative_logits: Tensor, class_ids: Tensor, labels: Tensor) -> Tensor:
    """[B, S] logits of the classes `class_ids` [S] (ascending), -inf where the class is among the row's labels.

    labels: [B, L] int64, -1 for none.
    """
    slots = torch.searchsorted(class_ids, labels.clamp_min(0))
    slots = slots.clamp_max(len(class_ids) - 1)
    own = (class_ids[slots] == labels) & (labels >= 0)
    hits = torch.zeros_like(negative_logits, dtype=torch.bool)
    rows, columns = own.nonzero(as_tuple=True)
    hits[rows, slots[rows, columns]] = True
    return negative_logits.masked_fill(hits, -torch.inf)
