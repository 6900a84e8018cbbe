"""Images to the embeddings artifact."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifact import Artifact, Draft, Parent, Request, find_published
from mlcd.cores import available_cores
from mlcd.embeddings import ERRORS, KEY_SCHEMA, keys_name, part_name
from mlcd.encoders.base import Encoder
from mlcd.errors import ImageRejected, InvalidInput
from mlcd.images.prefetch import Prepared, prepare_all
from mlcd.images.sources import Entry, Source
from mlcd.keys import split_positions
from mlcd.progress import Meter, Reporter
from mlcd.types import SampleKey

_PART_ENTRIES: Final = 2048
_BATCH: Final = 32


def embed(source: Source, encoder: Encoder, out: Path, reporter: Reporter) -> Artifact:
    """Encode every image of `source`; those that cannot be used are listed in errors.jsonl.

    Work is committed in parts of consecutive entries: a rerun after a crash starts at the first unfinished
    part and ends with the same bytes. Raises InvalidInput when there is no image, or none that can be used.
    """
    entries = source.entries
    folder = Path(source.location).resolve()
    if folder.is_dir() and out.resolve().is_relative_to(folder):
        raise InvalidInput(f"{out} lies inside the images {source.location}", remedy="give an output elsewhere")
    if not entries:
        raise InvalidInput(f"there are no images in {source.location}", remedy="give a folder that holds some")
    request = Request(
        "embeddings",
        {
            "precision": encoder.precision,
            "engine": encoder.engine,
            "part_entries": _PART_ENTRIES,
            "batch": _BATCH,
        },
        (images_parent(source, out),),
        encoder.fingerprint,
    )
    if (done := find_published(out, request)) is not None:
        return done
    num_parts = -(-len(entries) // _PART_ENTRIES)
    with Draft(out, request) as draft:
        splits = split_positions([entry.key for entry in entries], [entry.class_name for entry in entries])
        finished = next((part for part in range(num_parts) if not draft.has(_errors_name(part))), num_parts)
        with reporter.stage("embed", len(entries), done=min(finished * _PART_ENTRIES, len(entries))) as meter:
            for part in range(finished, num_parts):
                chosen = slice(part * _PART_ENTRIES, (part + 1) * _PART_ENTRIES)
                split_of = {e.key: split for e, split in zip(entries[chosen], splits[chosen].tolist(), strict=True)}
                _embed_part(draft, part, source, entries[chosen], split_of, encoder, meter)
        errors = _merge_errors(draft, num_parts, source)
        num_rows = sum(pq.read_metadata(draft.path / keys_name(part)).num_rows for part in range(num_parts))
        if num_rows == 0:
            raise InvalidInput(
                f"none of the {len(entries)} files in {source.location} is a usable image",
                remedy=f"the first: {errors[0]['key']}: {errors[0]['detail']}",
            )
        summary = {
            "images": num_rows,
            "errors": len(errors),
            "dimension": encoder.dimension,
            "model": encoder.name,
        }
        return draft.publish(summary=summary)


def images_parent(source: Source, out: Path) -> Parent:
    """The images as a parent: a relative path (or glob) on this machine, else the URL."""
    remote = "://" in source.location
    place = source.location if remote else os.path.relpath(os.path.realpath(source.location), out.resolve())
    return Parent("images", place, source.listing_digest())


@dataclass
class _Part:
    split_of: dict[SampleKey, float]
    rows: list[np.ndarray] = field(default_factory=list)
    keys: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)

    def reject(self, entry: Entry, rejection: ImageRejected) -> None:
        self.errors.append({"key": entry.key, "reason": rejection.reason, "detail": rejection.message})

    def encode(self, batch: list[Prepared], encoder: Encoder) -> None:
        if not batch:
            return
        rows = encoder.encode(np.stack([prepared.pixels for prepared in batch if prepared.pixels is not None]))
        for prepared, row in zip(batch, rows, strict=True):
            if row.any():
                self.rows.append(row)
                entry = prepared.entry
                facts = {"key": entry.key, "class_name": entry.class_name, "sha256": prepared.sha256}
                self.keys.append({**facts, "split": self.split_of[entry.key]})
            else:
                rejection = ImageRejected("no-embedding", f"{encoder.name} finds nothing in this image to describe")
                self.reject(prepared.entry, rejection)


def _embed_part(
    draft: Draft,
    index: int,
    source: Source,
    entries: Sequence[Entry],
    split_of: dict[SampleKey, float],
    encoder: Encoder,
    meter: Meter,
) -> None:
    part = _Part(split_of)
    batch: list[Prepared] = []
    for prepared in prepare_all(source, entries, encoder.preprocess, num_threads=available_cores()):
        if prepared.rejection is not None:
            part.reject(prepared.entry, prepared.rejection)
        else:
            batch.append(prepared)
        if len(batch) == _BATCH:
            part.encode(batch, encoder)
            batch = []
        meter.advance(1, errors=len(part.errors))
    part.encode(batch, encoder)
    rows = np.stack(part.rows) if part.rows else np.zeros((0, encoder.dimension), np.float32)
    with draft.write(part_name(index)) as path, path.open("wb") as file:
        np.save(file, rows, allow_pickle=False)
    with draft.write(keys_name(index)) as path:
        pq.write_table(pa.Table.from_pylist(part.keys, schema=KEY_SCHEMA), path)
    # Written last: it says that the part is finished.
    with draft.write(_errors_name(index)) as path:
        path.write_text("".join(json.dumps(error) + "\n" for error in part.errors))


def _errors_name(part: int) -> str:
    return f".errors-{part:05d}.jsonl"


def _merge_errors(draft: Draft, num_parts: int, source: Source) -> list[dict[str, str]]:
    errors = [{"key": problem.key, "reason": "unreadable", "detail": problem.detail} for problem in source.problems]
    for part in range(num_parts):
        lines = (draft.path / _errors_name(part)).read_text().splitlines()
        errors.extend(json.loads(line) for line in lines)
    with draft.write(ERRORS) as path:
        path.write_text("".join(json.dumps(error) + "\n" for error in errors))
    return errors
