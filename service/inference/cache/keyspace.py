"""The keys of cached embeddings, made of everything that an embedding depends on."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from mlcd.images.decode import DecodeLimits
from service.inference.cache.vectors import VectorFormat
from service.inference.served import ServedEncoder

_DECODERS: Final = ("mlcd", "pillow", "simplejpeg")
_NAME: Final = "mlcd:vector:1"  # the prefix of our keys in Redis, with the version of the layout


class KeySpace:
    """The keys of one served model.

    They depend on the fingerprint, preprocessing (with EXIF and decode mode), engine, precision,
    format of the vectors, limits of images, and the versions of the packages that decode and
    compute. Two models that differ in any of these share no key.
    """

    def __init__(self, encoder: ServedEncoder, vectors: VectorFormat, limits: DecodeLimits) -> None:
        described = {
            "fingerprint": encoder.fingerprint,
            "preprocess": asdict(encoder.preprocess),
            "engine": encoder.engine,
            "precision": encoder.precision,
            "vectors": asdict(vectors),
            "limits": asdict(limits),
            "versions": {name: _version(name) for name in (*_DECODERS, encoder.engine)},
        }
        self._digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()
        self._prefix = f"{_NAME}:{encoder.fingerprint[:12]}:"

    def keys(self, images: Iterable[bytes]) -> list[bytes]:
        """Returns the SHA-256 over the key space and each image's bytes, 32 bytes each."""
        return [
            hashlib.sha256(self._digest + hashlib.sha256(image).digest()).digest()
            for image in images
        ]

    def name(self, key: bytes) -> str:
        """Returns the key's name in Redis.

        Names of one model share a prefix, so that an operator can find them.
        """
        return self._prefix + key.hex()


def _version(package: str) -> str | None:
    """Returns the version of a package, None where it is not installed or no package.

    Engines have the names of their packages.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None
