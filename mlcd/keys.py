"""Sample keys: which of them are held out for evaluation."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ConfigInvalid
from mlcd.types import SampleKey

HELD_OUT_FRACTION = 0.2


def split_positions(keys: Sequence[SampleKey], class_names: Sequence[str | None]) -> NDArray[np.float64]:
    """[N] in (0, 1): where each key stands in its class (or overall where no class is known), by SHA-256.

    To be taken over everything that a source lists, so that every step finds the same split, whichever images
    it could use.
    """
    rows_of_class: dict[str | None, list[int]] = defaultdict(list)
    for row, class_name in enumerate(class_names):
        rows_of_class[class_name].append(row)
    positions = np.zeros(len(keys), dtype=np.float64)
    for rows in rows_of_class.values():
        by_hash = sorted(rows, key=lambda row: hashlib.sha256(keys[row].encode()).digest())
        positions[by_hash] = (np.arange(len(rows)) + 0.5) / len(rows)
    return positions


def held_out(positions: NDArray[np.float64], fraction: float = HELD_OUT_FRACTION) -> NDArray[np.bool_]:
    """[N] bool, True for the samples that clustering and training must not see: that share of each class."""
    if not 0.0 <= fraction < 1.0:
        raise ConfigInvalid(f"the held-out fraction must be in [0, 1), got {fraction}")
    return positions <= fraction
