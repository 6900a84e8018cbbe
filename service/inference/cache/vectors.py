"""The stored bytes of cached vectors, with a checksum that detects changed bytes."""

import struct
import zlib
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlcd.types import unit_rows

VectorType = Literal["float32", "float16"]

_SEAL: Final = struct.Struct("<32sI")
_UNIT_TOLERANCE: Final = 1e-3  # of the norm; rounding to float16 changes it by up to 2**-11


@dataclass(frozen=True)
class VectorFormat:
    """The stored format of a vector of `dimension` components, little-endian."""

    dimension: int
    dtype: VectorType = "float32"

    @property
    def exact(self) -> bool:
        return self.dtype == "float32"

    def pack(self, vector: NDArray[np.float32]) -> bytes:
        """Returns the bytes of a unit vector [D]; float16 rounds it."""
        return vector.astype(self._stored).tobytes()

    def unpack(self, packed: bytes) -> NDArray[np.float32]:
        """Returns a vector [D] of unit norm: from float32 the exact vector, from float16 the
        rounded vector, normalized again.

        Every machine gets the same bits: in float64, the squares of float16 numbers add up to 1
        without rounding, in any order.
        """
        stored = np.frombuffer(packed, self._stored)
        return (
            stored.astype(np.float32)
            if self.exact
            else unit_rows(stored[None].astype(np.float64))[0]
        )

    def seal(self, key: bytes, packed: bytes) -> bytes:
        """Prepends the key and a checksum, for a store that other programs can write to."""
        return _SEAL.pack(key, zlib.crc32(packed)) + packed

    def unseal(self, key: bytes, sealed: object) -> bytes | None:
        """Returns the packed vector of `seal`; None for another key or damaged content."""
        if (
            not isinstance(sealed, bytes)
            or len(sealed) != _SEAL.size + self._stored.itemsize * self.dimension
        ):
            return None
        stored_key, checksum = _SEAL.unpack_from(sealed)
        packed = sealed[_SEAL.size :]
        return (
            packed
            if stored_key == key and zlib.crc32(packed) == checksum and self.is_sound(packed)
            else None
        )

    def is_sound(self, packed: bytes) -> bool:
        """Tells whether a vector is finite and of unit norm, so that wrong results of a faulty
        engine are not cached.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # stored bytes may be anything
            norm = np.linalg.norm(np.frombuffer(packed, self._stored).astype(np.float64))
        return bool(abs(norm - 1) < _UNIT_TOLERANCE)  # false for NaN and infinity

    @property
    def _stored(self) -> np.dtype[np.floating]:
        return np.dtype("<f4" if self.exact else "<f2")
