"""The formats of embeddings other than float32 arrays."""

import base64
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.service.errors import BadRequest
from mlcd.types import Embeddings

_INT8_MAX: Final = 127
_UINT8_ZERO: Final = 128


def as_base64(rows: NDArray[Any]) -> list[str]:
    """Returns each row's bytes, little-endian float32, in base64."""
    return [base64.b64encode(row).decode() for row in np.ascontiguousarray(rows, dtype="<f4")]


def as_int8(rows: Embeddings) -> NDArray[np.int8]:
    """Returns each row divided by its largest absolute component, times 127, rounded: [N, D].

    Cosines change only by the rounding.
    """
    largest = np.abs(rows).max(axis=1, keepdims=True)
    rounded: NDArray[np.int8] = np.rint(rows * (_INT8_MAX / largest)).astype(np.int8)
    return rounded


def as_uint8(rows: Embeddings) -> NDArray[np.uint8]:
    """Returns the values of `as_int8` plus 128."""
    return (as_int8(rows).astype(np.int16) + _UINT8_ZERO).astype(np.uint8)


def as_ubinary(rows: Embeddings, *, param: str) -> NDArray[np.uint8]:
    """Packs rows into [N, D / 8]: bit = component >= 0, the first in the most significant bit.

    Raises BadRequest, with `param`, unless D is divisible by 8.
    """
    if rows.shape[1] % 8:
        raise BadRequest(
            f"binary requires a dimension divisible by 8, got {rows.shape[1]}", param=param
        )
    return np.packbits(rows >= 0, axis=1)


def as_binary(rows: Embeddings, *, param: str) -> NDArray[np.int8]:
    """Returns the values of `as_ubinary` minus 128."""
    return (as_ubinary(rows, param=param).astype(np.int16) - _UINT8_ZERO).astype(np.int8)
