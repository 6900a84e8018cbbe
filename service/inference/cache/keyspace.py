"""The keys of cached embeddings, made of everything that an embedding depends on."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from mlcd.images.decode import DecodeLimits
from mlcd.service.inference.cache.vectors import VectorFormat
from mlcd.service.inference.served import ServedEncoder, ServedTextEncoder, ServedTower
from mlcd.types import Fingerprint

_DECODERS: Final = ("mlcd", "pillow", "simplejpeg")
_NAME: Final = "mlcd:vector:1"  # the prefix of our keys in Redis, with the version of the layout


class KeySpace:
    """The keys of one tower of a served model.

    They depend on everything that an embedding depends on. Two towers or models that differ in any
    of it share no key.
    """

    def __init__(self, described: Mapping[str, object]) -> None:
        self._digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()

    @classmethod
    def of_images(
        cls, encoder: ServedEncoder, vectors: VectorFormat, limits: DecodeLimits
    ) -> "KeySpace":
        """Returns the keys of images.

        They depend on the fingerprint, preprocessing (with EXIF and decode mode), engine,
        precision, format of the vectors, limits of images, and the versions of the packages that
        decode and compute.
        """
        return cls(
            {
                **_describe_space(encoder, vectors, _DECODERS),
                "preprocess": asdict(encoder.preprocess),
                "limits": asdict(limits),
            }
        )

    @classmethod
    def of_texts(cls, encoder: ServedTextEncoder, vectors: VectorFormat) -> "KeySpace":
        """Returns the keys of token ids: two texts with the same ids have one key."""
        return cls({**_describe_space(encoder, vectors, ("mlcd",)), "tower": "texts"})

    def keys(self, items: Iterable[bytes]) -> list[bytes]:
        """Returns the SHA-256 over the key space and each item's bytes, 32 bytes each."""
        return [
            hashlib.sha256(self._digest + hashlib.sha256(item).digest()).digest() for item in items
        ]


def redis_prefix(fingerprint: Fingerprint) -> str:
    """Returns the prefix that all names of one model share, so that an operator can find them."""
    return f"{_NAME}:{fingerprint[:12]}:"


def _describe_space(
    encoder: ServedTower, vectors: VectorFormat, packages: Sequence[str]
) -> dict[str, object]:
    return {
        "fingerprint": encoder.fingerprint,
        "engine": encoder.engine,
        "precision": encoder.precision,
        "vectors": asdict(vectors),
        "versions": {name: _version(name) for name in (*packages, encoder.engine)},
    }


def _version(package: str) -> str | None:
    """Returns the version of a package, None where it is not installed or no package.

    Engines have the names of their packages.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None
