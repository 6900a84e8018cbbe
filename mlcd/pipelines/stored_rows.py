"""Takes the rows of images from an embeddings artifact instead of an encoder."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import MANIFEST, read_manifest
from mlcd.errors import ImageRejected
from mlcd.images.entries import Entry
from mlcd.images.source import Source
from mlcd.pipelines.encoded import EncodedPart
from mlcd.types import SampleKey


class StoredRows:
    """The rows of an embeddings artifact, by key."""

    def __init__(self, path: Path) -> None:
        self._embeddings = EmbeddingsArtifact.open(path)

    @cached_property
    def _row_of(self) -> dict[SampleKey, int]:
        return {key: row for row, key in enumerate(self._embeddings.keys)}

    def encode_entries(self, source: Source, entries: Sequence[Entry]) -> EncodedPart:
        """Returns these images with their rows, in the form of `mlcd.pipelines.encoded`. An image
        without a row is an error.
        """
        usable: list[Entry] = []
        digests: list[bytes] = []
        errors: list[dict[str, str]] = []
        for entry in entries:
            if entry.key not in self._row_of:
                errors.append(
                    {"key": entry.key, "reason": "no-vector", "detail": "no vector has its key"}
                )
                continue
            try:
                digests.append(hashlib.sha256(source.read(entry)).digest())
                usable.append(entry)
            except ImageRejected as error:
                errors.append({"key": entry.key, "reason": error.reason, "detail": error.message})
        rows = np.array([self._row_of[entry.key] for entry in usable], np.int64)
        return EncodedPart(usable, digests, self._embeddings.rows_at(rows), errors)


def holds_embeddings(model: str) -> bool:
    """Tells whether a model's spec is an embeddings artifact."""
    path = Path(model)
    return (path / MANIFEST).is_file() and read_manifest(path).kind == "embeddings"
