"""Writes an embeddings artifact from the rows that a collection already contains."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.embeddings import ERRORS, KEY_SCHEMA, keys_name, part_name
from mlcd.artifacts.manifest import Artifact, Request
from mlcd.collections.port import CollectionPort
from mlcd.encoders.encoder import Encoder
from mlcd.errors import InvalidInput
from mlcd.images.source import Source
from mlcd.keys import split_positions
from mlcd.pipelines.encoded import PART_ENTRIES, images_parent, part_sizes, part_slice
from mlcd.types import SampleKey

_BLOCK_ITEMS: Final = 8192


def write_embeddings(
    source: Source,
    collection: CollectionPort,
    encoder: Encoder,
    out: Path,
    *,
    image_sha256: Mapping[SampleKey, bytes],
    errors: list[dict[str, str]],
) -> Artifact:
    """Writes the rows of items whose ids are keys of the source, in the order of the source.

    encoder: encoder that made the rows. image_sha256: digest of each item's image, by key. errors:
    key, reason and detail of each image without a row. Raises InvalidInput if no image has a row.
    """
    entries = source.entries
    rows = [(item.id, item.embedding) for block in collection.items(_BLOCK_ITEMS) for item in block]
    indices = entries.find(
        pa.chunked_array([pa.array([key for key, _ in rows], pa.large_string())])
    )
    row_of = {int(index): row for index, (_, row) in zip(indices, rows, strict=True) if index >= 0}
    if not row_of:
        raise InvalidInput(
            f"none of the images in {source.location} has a row in the collection",
            remedy="embed the images first",
        )
    keys, class_names = list(entries.keys()), list(entries.class_names())
    splits = split_positions(keys, class_names)
    order = sorted(row_of)
    config = {
        "precision": encoder.precision,
        "engine": encoder.engine,
        **source.config,
        "part_entries": PART_ENTRIES,
        "items": len(order),
    }
    request = Request("embeddings", config, (images_parent(source, out),), encoder.fingerprint)
    with Draft(out, request, fresh=True) as draft:
        for part in range(len(part_sizes(len(order), PART_ENTRIES))):
            part_indices = order[part_slice(part, PART_ENTRIES)]
            with draft.write(part_name(part)) as path, path.open("wb") as file:
                vectors = np.stack([row_of[index] for index in part_indices]).astype(np.float32)
                np.save(file, vectors, allow_pickle=False)
            columns = [
                {
                    "key": keys[index],
                    "class_name": class_names[index],
                    "sha256": image_sha256[keys[index]],
                    "split": float(splits[index]),
                }
                for index in part_indices
            ]
            with draft.write(keys_name(part)) as path:
                pq.write_table(pa.Table.from_pylist(columns, schema=KEY_SCHEMA), path)
        with draft.write(ERRORS) as path:
            path.write_text("".join(json.dumps(error) + "\n" for error in errors))
        return draft.publish(
            summary={
                "images": len(order),
                "errors": len(errors),
                "dimension": encoder.dimension,
                "model": encoder.name,
            }
        )
