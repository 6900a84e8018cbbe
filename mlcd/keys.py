"""The keys of samples: how foreign ones are compared, and their split, which decides what is held
out for evaluation.
"""

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
    """Returns the form in which keys are compared that are not the same: NFC, and the path without
    `./` and repeated slashes. Keys are stored as they are, because files are found by them.
    """
    path = posixpath.normpath(unicodedata.normalize("NFC", key))
    return path[1:] if path.startswith("//") else path  # POSIX keeps two slashes at the start


def normalize_class(name: str) -> str:
    """Returns the name of a class in NFC: the folders of some systems spell it otherwise."""
    return unicodedata.normalize("NFC", name)


def split_positions(
    keys: Iterable[SampleKey], class_names: Iterable[str | None]
) -> NDArray[np.float64]:
    """Returns [N] in (0, 1): the position of each key in its class (or overall where no class is
    known), by SHA-256.

    Apply it to everything that a source lists, so that every step finds the same split, whichever
    images it could use.
    """
    # The first half of the digests orders keys like the whole: no two keys are known to agree in
    # it.
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
    """Returns [N] bool, True for the samples that clustering and training must not see: that share
    of each class.
    """
    if not 0.0 <= fraction < 1.0:
        raise ConfigInvalid(f"the held-out fraction must be in [0, 1), got {fraction}")
    return positions <= fraction
