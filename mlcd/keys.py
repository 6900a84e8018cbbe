"""Sample keys: which of them are held out for evaluation."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ConfigInvalid
from mlcd.types import SampleKey

HELD_OUT_FRACTION = 0.2


def held_out(
    keys: Sequence[SampleKey], class_names: Sequence[str | None], fraction: float = HELD_OUT_FRACTION
) -> NDArray[np.bool_]:
    """[N] bool, True for the samples that clustering and training must not see.

    In each class (or overall where no class is known) the `fraction` of keys with the smallest SHA-256,
    so that every step finds the same split from the keys alone.
    """
    if not 0.0 <= fraction < 1.0:
        raise ConfigInvalid(f"the held-out fraction must be in [0, 1), got {fraction}")
    rows_of_class: dict[str | None, list[int]] = defaultdict(list)
    for row, class_name in enumerate(class_names):
        rows_of_class[class_name].append(row)
    mask = np.zeros(len(keys), dtype=np.bool_)
    for rows in rows_of_class.values():
        by_hash = sorted(rows, key=lambda row: hashlib.sha256(keys[row].encode()).digest())
        mask[by_hash[: int(fraction * len(rows) + 0.5)]] = True
    return mask
