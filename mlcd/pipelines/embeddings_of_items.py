"""The embeddings artifact of images whose rows a collection already holds."""

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

_BLOCK: Final = 8192


def write_embeddings(
    source: Source,
    collection: CollectionPort,
    encoder: Encoder,
    out: Path,
    *,
    image_sha256: Mapping[SampleKey, bytes],
    errors: list[dict[str, str]],
) -> Artifact:
    """Writes the rows of the items whose ids are keys of the source, in the source's order.

    encoder: the encoder of the items. image_sha256: the digest of each item's image. errors: key,
    reason and detail of the images without a row. Raises InvalidInput without any row.
    """
    entries = source.entries
    blocks = [(item.id, item.embedding) for block in collection.items(_BLOCK) for item in block]
    indices = entries.find(
        pa.chunked_array([pa.array([key for key, _ in blocks], pa.large_string())])
    )
    by_entry = {int(at): row for at, (_, row) in zip(indices, blocks, strict=True) if at >= 0}
    if not by_entry:
        raise InvalidInput(
            f"none of the images in {source.location} has a row", remedy="embed them first"
        )
    keys, class_names = list(entries.keys()), list(entries.class_names())
    splits = split_positions(keys, class_names)
    order = sorted(by_entry)
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
            rows = order[part_slice(part, PART_ENTRIES)]
            with draft.write(part_name(part)) as path, path.open("wb") as file:
                vectors = np.stack([by_entry[at] for at in rows]).astype(np.float32)
                np.save(file, vectors, allow_pickle=False)
            columns = [
                {
                    "key": keys[at],
                    "class_name": class_names[at],
                    "sha256": image_sha256[keys[at]],
                    "split": float(splits[at]),
                }
                for at in rows
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
