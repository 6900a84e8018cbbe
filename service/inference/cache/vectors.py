"""The bytes of cached vectors, which are read back only if they are what was written."""

import struct
import zlib
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlcd.types import unit_rows

VectorType = Literal["float32", "float16"]

_SEAL: Final = struct.Struct("<32sI")
_UNIT_TOLERANCE: Final = 1e-3  # of the norm; rounding to float16 alone makes 2**-11


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
        """Returns a vector [D] of unit norm.

        From float32 it is the vector itself, from float16 the rounded one, normalized again.
        Squares of float16 numbers add up to at most 1 without rounding in float64, in any order, so
        every machine gets the same bits.
        """
        stored = np.frombuffer(packed, self._stored)
        return (
            stored.astype(np.float32)
            if self.exact
            else unit_rows(stored[None].astype(np.float64))[0]
        )

    def seal(self, key: bytes, packed: bytes) -> bytes:
        """Puts the key and a checksum in front, for a store that others can write to."""
        return _SEAL.pack(key, zlib.crc32(packed)) + packed

    def unseal(self, key: bytes, sealed: object) -> bytes | None:
        """Returns what was sealed under this key; None for any other or damaged content."""
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
        """Tells whether a vector is finite and of unit norm.

        The results of a faulty engine must not outlive the fault.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # a foreign vector may hold anything
            norm = np.linalg.norm(np.frombuffer(packed, self._stored).astype(np.float64))
        return bool(abs(norm - 1) < _UNIT_TOLERANCE)  # false for NaN and infinity

    @property
    def _stored(self) -> np.dtype[np.floating]:
        return np.dtype("<f4" if self.exact else "<f2")
