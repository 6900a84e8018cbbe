"""The inputs of labels: an embeddings artifact, or images that are embedded first; both are read in
parts.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlcd.artifacts.embeddings import Block, EmbeddingsArtifact
from mlcd.artifacts.manifest import Parent
from mlcd.encoders.encoder import Encoder, job_batch
from mlcd.errors import InvalidInput
from mlcd.images.entries import Entries
from mlcd.images.source import Source
from mlcd.pipelines.encoded import (
    OnDone,
    choose_part_entries,
    encode_entries,
    images_parent,
    part_sizes,
    part_slice,
)
from mlcd.types import Embeddings, Fingerprint, SampleKey


@dataclass(frozen=True)
class LabelRows:
    """One part of an input.

    embeddings: float32 [n, D]. keys, image_sha256: of the n rows. errors: key, reason and detail of
    each image without a row.
    """

    embeddings: Embeddings
    keys: list[SampleKey]
    image_sha256: list[bytes]
    errors: list[dict[str, str]]


class LabelInput(Protocol):
    """Rows to label, in parts that can be read in any order and by any process."""

    # shown in messages
    name: str

    @property
    def fingerprint(self) -> Fingerprint: ...

    @property
    def config(self) -> dict[str, Any]:
        """Returns the settings that affect the rows, for the identity of the request."""
        ...

    @property
    def sizes(self) -> list[int]:
        """Returns the number of rows, or images, of each part."""
        ...

    def parent(self, out: Path) -> Parent: ...

    def ahead(self, parts: Sequence[int]) -> AbstractContextManager[None]:
        """Prefetches these parts, which will be read in this order."""
        ...

    def read(self, part: int, on_done: OnDone) -> LabelRows:
        """Reads one part. on_done: called repeatedly with (images done, errors so far)."""
        ...

    def close(self) -> None: ...


class EmbeddingsInput:
    """The `LabelInput` protocol over an embeddings artifact."""

    def __init__(self, embeddings: EmbeddingsArtifact, *, part_rows: int) -> None:
        self.embeddings = embeddings
        self.name = str(embeddings.artifact.path)
        self.config: dict[str, Any] = {}
        self._part_rows = part_rows

    @property
    def fingerprint(self) -> Fingerprint:
        return self.embeddings.fingerprint

    @property
    def sizes(self) -> list[int]:
        return [block.num_rows for block in self.blocks]

    @cached_property
    def blocks(self) -> list[Block]:
        return self.embeddings.plan(self._part_rows)

    def parent(self, out: Path) -> Parent:
        return self.embeddings.artifact.as_parent_of(out, "embeddings")

    def ahead(self, parts: Sequence[int]) -> AbstractContextManager[None]:
        del parts  # reading takes little time compared to the scan
        return nullcontext()

    def read(self, part: int, on_done: OnDone) -> LabelRows:
        del on_done  # reading takes little time compared to the scan
        block = self.blocks[part]
        rows, (keys, image_sha256) = self.embeddings.read(block), self.embeddings.read_keys(block)
        _check_rows(rows, block.start, keys)
        return LabelRows(rows, keys, image_sha256, [])

    def close(self) -> None: ...


class ImagesInput:
    """The `LabelInput` protocol over images, embedded in the same way as by `mlcd embed`."""

    def __init__(
        self,
        source: Source,
        encoder: Encoder,
        *,
        part_entries: int | None,
        num_threads: int,
        in_flight: int = 1,
    ) -> None:
        """part_entries: images per part; None uses `choose_part_entries`. num_threads: number of
        decoding threads. in_flight: see `encode_entries`.
        """
        self.source = source
        self.name = source.location
        self._encoder = encoder
        self._part_entries = part_entries or choose_part_entries(len(source.entries))
        self._num_threads, self._in_flight = num_threads, in_flight

    def of(self, source: Source) -> "ImagesInput":
        """Returns an input over `source` with the same encoder and settings."""
        return ImagesInput(
            source,
            self._encoder,
            part_entries=self._part_entries,
            num_threads=self._num_threads,
            in_flight=self._in_flight,
        )

    @property
    def fingerprint(self) -> Fingerprint:
        return self._encoder.fingerprint

    @property
    def config(self) -> dict[str, Any]:
        engine = {"precision": self._encoder.precision, "engine": self._encoder.engine}
        config = {"part_entries": self._part_entries, "batch": job_batch(self._encoder)}
        return engine | self.source.config | config

    @property
    def sizes(self) -> list[int]:
        return part_sizes(len(self.source.entries), self._part_entries)

    def parent(self, out: Path) -> Parent:
        return images_parent(self.source, out)

    def entries(self, part: int) -> Entries:
        return self.source.entries[part_slice(part, self._part_entries)]

    def ahead(self, parts: Sequence[int]) -> AbstractContextManager[None]:
        all_rows = np.arange(len(self.source.entries))
        rows = [all_rows[part_slice(part, self._part_entries)] for part in parts]
        return self.source.ahead(self.source.entries.select(np.concatenate([*rows, all_rows[:0]])))

    def read(self, part: int, on_done: OnDone) -> LabelRows:
        encoded = encode_entries(
            self.source,
            self.entries(part),
            self._encoder,
            num_threads=self._num_threads,
            on_done=on_done,
            in_flight=self._in_flight,
        )
        keys = [entry.key for entry in encoded.entries]
        return LabelRows(encoded.embeddings, keys, encoded.image_sha256, encoded.errors)

    def close(self) -> None:
        self._encoder.close()


def _check_rows(rows: Embeddings, start: int, keys: list[SampleKey]) -> None:
    """Raises InvalidInput naming the first row that is zero or not finite. start: id of row 0."""
    squared_norms = np.einsum("nd,nd->n", rows, rows)
    for row in np.flatnonzero(~np.isfinite(squared_norms) | (squared_norms == 0))[:1].tolist():
        why = "has norm 0" if squared_norms[row] == 0 else "holds NaN or Inf"
        raise InvalidInput(
            f"embeddings row {start + row} ({keys[row]}) {why}", remedy="remove this row"
        )
