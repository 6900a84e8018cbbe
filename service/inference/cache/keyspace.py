"""Makes the keys of cached embeddings from everything that an embedding depends on."""

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
_NAME: Final = "mlcd:vector:1"  # prefix of keys in Redis, with the version of the layout


class KeySpace:
    """The keys of one tower of a served model.

    Two towers or models share no key if they differ in anything that an embedding depends on.
    """

    def __init__(self, description: Mapping[str, object]) -> None:
        self._digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).digest()

    @classmethod
    def of_images(
        cls, encoder: ServedEncoder, vectors: VectorFormat, limits: DecodeLimits
    ) -> "KeySpace":
        """Returns the key space of images.

        It depends on the fingerprint, preprocessing (with EXIF and decode mode), engine, precision,
        format of the vectors, limits of images, and versions of the packages that decode and
        compute.
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
        """Returns the key space of texts, by token ids: texts with equal ids share a key."""
        return cls({**_describe_space(encoder, vectors, ("mlcd",)), "tower": "texts"})

    def keys(self, items: Iterable[bytes]) -> list[bytes]:
        """Returns a key of 32 bytes per item: the SHA-256 of the key space and the item's bytes."""
        return [
            hashlib.sha256(self._digest + hashlib.sha256(item).digest()).digest() for item in items
        ]


def redis_prefix(fingerprint: Fingerprint) -> str:
    """Returns the prefix of all Redis keys of one model; operators can list the keys by it."""
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
    """Returns the version of a package; None if it is not installed.

    An engine usually has the name of its package; None for engines without a package.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None
