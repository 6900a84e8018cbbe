"""The keys of samples: their normalization, and the split that holds out samples for evaluation."""

import hashlib
import posixpath
import unicodedata
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ConfigInvalid
from mlcd.types import SampleKey

HELD_OUT_FRACTION = 0.2


def normalize_key(key: str) -> SampleKey:
    """Returns a key in normal form for comparisons: NFC, without `./` and repeated slashes. Stored
    keys are not normalized, because they locate files.
    """
    path = posixpath.normpath(unicodedata.normalize("NFC", key))
    return path[1:] if path.startswith("//") else path  # POSIX keeps two slashes at the start


def normalize_class(name: str) -> str:
    """Returns the name of a class in NFC: some file systems decompose the names of folders."""
    return unicodedata.normalize("NFC", name)


def split_positions(
    keys: Iterable[SampleKey], class_names: Iterable[str | None]
) -> NDArray[np.float64]:
    """Orders the keys of each class (or all, without classes) by SHA-256, and returns each key's
    relative rank, [N] in (0, 1).

    Call it with all keys of a source, including images that a step cannot use, so that every step
    computes the same split.
    """
    # The first half of a digest suffices as a sort key: no two keys are known to share it.
    halves = np.fromiter((hashlib.sha256(key.encode()).digest()[:16] for key in keys), dtype="S16")
    number_of: dict[str | None, int] = {}
    classes = np.fromiter(
        (number_of.setdefault(name, len(number_of)) for name in class_names), dtype=np.int64
    )
    high, low = halves.view(">u8").reshape(-1, 2).T
    by_hash = np.lexsort((low, high, classes))
    sizes = np.bincount(classes)
    starts = np.cumsum(sizes) - sizes
    positions = np.empty(len(classes), dtype=np.float64)
    positions[by_hash] = (np.arange(len(classes)) - np.repeat(starts, sizes) + 0.5) / np.repeat(
        sizes, sizes
    )
    return positions


def mask_held_out(
    positions: NDArray[np.float64], fraction: float = HELD_OUT_FRACTION
) -> NDArray[np.bool_]:
    """Returns [N] bool, True for the samples that clustering and training must not see: the given
    share of each class.
    """
    if not 0.0 <= fraction < 1.0:
        raise ConfigInvalid(f"the held-out fraction must be in [0, 1), got {fraction}")
    return positions <= fraction
