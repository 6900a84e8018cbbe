"""Types that all packages share: arrays, identifiers, and conversions of rows and cosines."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ConfigInvalid, InvalidInput

# [N, D] float32, rows of unit L2 norm
Embeddings: TypeAlias = NDArray[np.float32]

_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_SHORT_CHARS: Final = 80  # characters of a value in a repr

# The product of a float32 unit row with itself differs from 1 by less than this.
_COPY_ROUNDING: Final = 2.0**-20

# [N, 3, H, W] uint8, RGB: the input of every encoder
ImageBatch: TypeAlias = NDArray[np.uint8]

# [N, T] int64, token ids of texts, padded to one length: the input of every text encoder
TokenBatch: TypeAlias = NDArray[np.int64]

# hex SHA-256 of a model's tensors and preprocessing; only embeddings of one fingerprint compare
Fingerprint: TypeAlias = str

# issues that the pixels of an image show; an image gets the first that applies
Issue: TypeAlias = Literal["odd-size", "odd-aspect", "dark", "light", "low-information", "blurry"]
ISSUES: Final[tuple[Issue, ...]] = get_args(Issue)

# the permanent name of one sample inside its source: relative path, or shard/key
SampleKey: TypeAlias = str


class ShortRepr:
    """A base of dataclasses with `repr=False`, whose repr is one line: shows arrays by dtype and
    shape, collections by their length.
    """

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={_shorten(value)}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


def _shorten(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, list | tuple | dict):
        return f"<{type(value).__name__} of {len(value)}>"
    text = repr(value)
    return text if len(text) <= _SHORT_CHARS else f"{text[:_SHORT_CHARS]}…"


def as_array(rows: Any) -> NDArray[Any]:
    """Returns a NumPy array, a torch tensor on any device, or lists as an array of numbers.

    Raises InvalidInput for anything else.
    """
    try:
        if hasattr(rows, "detach"):  # a tensor; NumPy has no bfloat16
            rows = rows.detach().cpu()
            rows = rows.float() if rows.is_floating_point() else rows
        array = np.asarray(rows)
        return array if np.issubdtype(array.dtype, np.number) else array.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"rows must be numbers [N, D], got {type(rows).__name__}",
            remedy="give an array, a tensor, or lists of equal length",
        ) from error


@dataclass(frozen=True)
class ScanCounts:
    """The arithmetic of an exact scan, and the number of rows that each level settled.

    products: name of the arithmetic. proven: rows settled by the first pass. wider: by another
    pass, with more candidates or without compiled loops. float32, float64: by a scan in that
    precision.
    """

    products: str
    proven: int
    wider: int
    float32: int
    float64: int


@dataclass(frozen=True)
class Neighbors:
    """The nearest entries of each query, best first.

    ids: [N, L] int32 or int64, padded with -1. scores: [N, L] float32, padded with -inf. Ordered by
    descending score, then ascending id. scan: how a scan found an exact answer; otherwise None.
    """

    ids: NDArray[np.integer]
    scores: NDArray[np.float32]
    scan: ScanCounts | None = None

    def as_cosines(self) -> "Neighbors":
        """Returns the neighbors of unit rows with their scores converted by `cosines`."""
        return replace(self, scores=cosines(self.scores))


def model_name(name: object) -> str:
    """Returns `name`. Raises ConfigInvalid if it is invalid in URLs, headers or Triton folders."""
    if not isinstance(name, str) or not _MODEL_NAME.fullmatch(name):
        raise ConfigInvalid(
            f"{name!r} cannot name a model", remedy="use letters, digits, dot, dash and underscore"
        )
    return name


def cosines(products: NDArray[np.floating]) -> NDArray[np.float32]:
    """Returns products of unit rows as the cosines that users see: float32 in [-1, 1]; -inf, which
    means no neighbor, stays. Products within the rounding error of 1 become 1, as for copies.
    """
    similarities = np.maximum(products, -1.0, where=np.isfinite(products), out=products.copy())
    similarities[similarities >= 1 - _COPY_ROUNDING] = 1.0
    rounded: NDArray[np.float32] = similarities.astype(np.float32)
    return rounded


def min_dot_product(threshold: float) -> float:
    """Returns the smallest dot product of unit rows that `cosines` rounds to at least a threshold.

    Cosines compare in float32, so a similarity from an answer can be used as the threshold.
    """
    least = np.float32(threshold)
    if least <= -1:
        return -math.inf
    below = np.nextafter(least, np.float32(-math.inf))
    middle = (float(below) + float(least)) / 2
    if np.float32(middle) < least:
        middle = math.nextafter(middle, math.inf)
    return min(middle, 1 - _COPY_ROUNDING)


def unit_rows(rows: NDArray[np.floating]) -> Embeddings:
    """Divides rows by their L2 norm: [N, D] to float32 [N, D].

    Raises InvalidInput naming the first row that is not finite or whose norm is 0.
    """
    if rows.ndim != 2:
        raise InvalidInput(f"rows must have shape [N, D], got {list(rows.shape)}")
    norms = np.linalg.norm(rows.astype(np.float64, copy=False), axis=1, keepdims=True)
    usable = np.isfinite(norms[:, 0]) & (norms[:, 0] > 0)
    if not usable.all():
        row = int(np.flatnonzero(~usable)[0])
        raise InvalidInput(
            f"rows must have a finite, positive norm, got {norms[row, 0]} in row {row}",
            remedy="remove NaN, Inf and zero rows",
        )
    return np.ascontiguousarray((rows / norms).astype(np.float32))
