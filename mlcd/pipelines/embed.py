"""Images to the embeddings artifact."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifact import Artifact, Draft, Parent, Request, find_published
from mlcd.cores import available_cores
from mlcd.embeddings import KEY_SCHEMA, keys_name, part_name
from mlcd.encoders.base import Encoder
from mlcd.images.entries import Entries
from mlcd.images.sources import Source
from mlcd.keys import split_positions
from mlcd.pipelines.encoded import (
    BATCH,
    PART_ENTRIES,
    check_source,
    encode_entries,
    errors_name,
    merge_errors,
    no_usable_image,
    write_errors,
)
from mlcd.progress import Meter, Reporter
from mlcd.types import SampleKey


def embed(source: Source, encoder: Encoder, out: Path, reporter: Reporter) -> Artifact:
    """Encode every image of `source`; those that cannot be used are listed in errors.jsonl.

    Work is committed in parts of consecutive entries: a rerun after a crash starts at the first unfinished
    part and ends with the same bytes. Raises InvalidInput when there is no image, or none that can be used.
    """
    entries = source.entries
    check_source(source, out)
    request = Request(
        "embeddings",
        {
            "precision": encoder.precision,
            "engine": encoder.engine,
            "part_entries": PART_ENTRIES,
            "batch": BATCH,
        },
        (images_parent(source, out),),
        encoder.fingerprint,
    )
    if (done := find_published(out, request)) is not None:
        return done
    num_parts = -(-len(entries) // PART_ENTRIES)
    with Draft(out, request) as draft:
        splits = split_positions(entries.keys(), entries.class_names())
        finished = next((part for part in range(num_parts) if not draft.has(errors_name(part))), num_parts)
        with reporter.stage("embed", len(entries), done=min(finished * PART_ENTRIES, len(entries))) as meter:
            for part in range(finished, num_parts):
                chosen = slice(part * PART_ENTRIES, (part + 1) * PART_ENTRIES)
                split_of = dict(zip(entries[chosen].keys(), splits[chosen].tolist(), strict=True))
                _embed_part(draft, part, source, entries[chosen], split_of, encoder, meter)
        errors = merge_errors(draft, num_parts, source)
        num_rows = sum(pq.read_metadata(draft.path / keys_name(part)).num_rows for part in range(num_parts))
        if num_rows == 0:
            raise no_usable_image(source, errors)
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


def _embed_part(
    draft: Draft,
    index: int,
    source: Source,
    entries: Entries,
    split_of: dict[SampleKey, float],
    encoder: Encoder,
    meter: Meter,
) -> None:
    part = encode_entries(
        source,
        entries,
        encoder,
        num_threads=available_cores(),
        on_image=lambda num_errors: meter.advance(1, errors=num_errors),
    )
    keys = [
        {"key": entry.key, "class_name": entry.class_name, "sha256": sha256, "split": split_of[entry.key]}
        for entry, sha256 in zip(part.entries, part.image_sha256, strict=True)
    ]
    with draft.write(part_name(index)) as path, path.open("wb") as file:
        np.save(file, part.embeddings, allow_pickle=False)
    with draft.write(keys_name(index)) as path:
        pq.write_table(pa.Table.from_pylist(keys, schema=KEY_SCHEMA), path)
    # Written last: it says that the part is finished.
    write_errors(draft, index, part.errors)
