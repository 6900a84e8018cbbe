"""Images to embeddings, part by part: what every pipeline that starts from images shares.

A part is a number of consecutive entries of the source. Its bytes depend on the source, the model and the sizes
below, whatever process makes it and when.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from mlcd.artifact import Draft
from mlcd.embeddings import ERRORS
from mlcd.encoders.base import Encoder
from mlcd.errors import ImageRejected, InvalidInput
from mlcd.images.entries import Entry
from mlcd.images.prefetch import Prepared, prepare_all
from mlcd.images.sources import Source
from mlcd.types import Embeddings

PART_ENTRIES: Final = 2048
BATCH: Final = 32


@dataclass(frozen=True)
class EncodedPart:
    """entries, image_sha256, embeddings (float32 [n, D] unit rows): the n usable images. errors: the others."""

    entries: list[Entry]
    image_sha256: list[bytes]
    embeddings: Embeddings
    errors: list[dict[str, str]]


def check_source(source: Source, out: Path) -> None:
    """Raise InvalidInput where there is no image, or where `out` would become one of the images' files."""
    folder = Path(source.location).resolve()
    if folder.is_dir() and out.resolve().is_relative_to(folder):
        raise InvalidInput(f"{out} lies inside the images {source.location}", remedy="give an output elsewhere")
    source.check_not_empty()


def encode_entries(
    source: Source,
    entries: Sequence[Entry],
    encoder: Encoder,
    *,
    num_threads: int,
    on_image: Callable[[int], None],
) -> EncodedPart:
    """Decode and encode these entries, in batches that depend on nothing else. on_image: told the errors so far."""
    part = _Growing(encoder)
    batch: list[Prepared] = []
    for prepared in prepare_all(source, entries, encoder.preprocess, num_threads=num_threads):
        if prepared.rejection is not None:
            part.reject(prepared.entry, prepared.rejection)
        else:
            batch.append(prepared)
        if len(batch) == BATCH:
            part.encode(batch)
            batch = []
        on_image(len(part.errors))
    part.encode(batch)
    return part.finished()


@dataclass
class _Growing:
    encoder: Encoder
    entries: list[Entry] = field(default_factory=list)
    image_sha256: list[bytes] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)

    def reject(self, entry: Entry, rejection: ImageRejected) -> None:
        self.errors.append({"key": entry.key, "reason": rejection.reason, "detail": rejection.message})

    def encode(self, batch: list[Prepared]) -> None:
        if not batch:
            return
        rows = self.encoder.encode(np.stack([prepared.pixels for prepared in batch if prepared.pixels is not None]))
        for prepared, row in zip(batch, rows, strict=True):
            if row.any():
                self.rows.append(row)
                self.entries.append(prepared.entry)
                self.image_sha256.append(prepared.sha256)
            else:
                detail = f"{self.encoder.name} finds nothing in this image to describe"
                self.reject(prepared.entry, ImageRejected("no-embedding", detail))

    def finished(self) -> EncodedPart:
        rows = np.stack(self.rows) if self.rows else np.zeros((0, self.encoder.dimension), np.float32)
        return EncodedPart(self.entries, self.image_sha256, rows, self.errors)


def errors_name(part: int) -> str:
    """A working note of the draft: hidden, and gone when it is published."""
    return f".errors-{part:05d}.jsonl"


def write_errors(draft: Draft, part: int, errors: list[dict[str, str]]) -> None:
    with draft.write(errors_name(part)) as path:
        path.write_text("".join(json.dumps(error) + "\n" for error in errors))


def merge_errors(draft: Draft, num_parts: int, source: Source) -> list[dict[str, str]]:
    """All errors, in the order of the source, also written to the artifact's errors.jsonl."""
    errors = [{"key": problem.key, "reason": "unreadable", "detail": problem.detail} for problem in source.problems]
    for part in range(num_parts):
        lines = (draft.path / errors_name(part)).read_text().splitlines()
        errors.extend(json.loads(line) for line in lines)
    with draft.write(ERRORS) as path:
        path.write_text("".join(json.dumps(error) + "\n" for error in errors))
    return errors


def no_usable_image(source: Source, errors: list[dict[str, str]]) -> InvalidInput:
    return InvalidInput(
        f"none of the {len(source.entries)} files in {source.location} is a usable image",
        remedy=f"the first: {errors[0]['key']}: {errors[0]['detail']}",
    )
