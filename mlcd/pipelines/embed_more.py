"""Adds the new images of a source to an embeddings artifact made from that source."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifacts.addition import Addition, open_addition
from mlcd.artifacts.embeddings import EmbeddingsArtifact, errors_name_from, keys_name
from mlcd.artifacts.manifest import Artifact, Parent
from mlcd.cores import available_cores
from mlcd.encoders.encoder import Encoder
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.images.entries import Entries
from mlcd.images.source import Source
from mlcd.keys import split_positions
from mlcd.pipelines.embed import write_encoded
from mlcd.pipelines.encoded import (
    check_source,
    encode_entries,
    errors_name,
    images_parent,
    merge_errors,
    part_sizes,
    part_slice,
)
from mlcd.progress import Reporter


def embed_more(source: Source, encoder: Encoder, out: Path, reporter: Reporter) -> Artifact:
    """Adds the images of `source` that the embeddings at `out` lack; existing rows stay.

    Retries images that failed before. If the process is killed at any moment, the artifact is in
    its old or its new state, and the same call continues. Raises ConfigInvalid if the new rows
    would not be comparable, InvalidInput if the artifact's images are at another location.
    """
    check_source(source, out)
    embeddings = EmbeddingsArtifact.open(out)
    parent = images_parent(source, out)
    _check_compatible(embeddings.artifact, parent, encoder)
    entries = _new_entries(source, embeddings)
    if not len(entries):
        return embeddings.artifact
    with open_addition(embeddings.artifact, (parent,), embeddings.num_parts) as addition:
        return _add(addition, source, entries, encoder, embeddings, reporter)


def _add(
    addition: Addition,
    source: Source,
    entries: Entries,
    encoder: Encoder,
    embeddings: EmbeddingsArtifact,
    reporter: Reporter,
) -> Artifact:
    artifact, draft = embeddings.artifact, addition.draft
    part_entries = int(artifact.config["part_entries"])
    sizes, first_part = part_sizes(len(entries), part_entries), embeddings.num_parts
    parts = range(first_part, first_part + len(sizes))
    positions = split_positions(source.entries.keys(), source.entries.class_names())
    splits = dict(zip(source.entries.keys(), positions.tolist(), strict=True))
    missing = [part for part in parts if not draft.has(errors_name(part))]
    done = sum(sizes) - sum(sizes[part - first_part] for part in missing)
    with reporter.stage("embed", sum(sizes), done=done) as meter:
        for part in missing:
            encoded = encode_entries(
                source,
                entries[part_slice(part - first_part, part_entries)],
                encoder,
                num_threads=available_cores(),
                on_done=lambda _, errors: meter.advance(1, errors=errors),
            )
            write_encoded(draft, part, encoded, splits)
    errors = merge_errors(draft, parts, source.problems, errors_name_from(first_part))
    num_rows = sum(pq.read_metadata(draft.path / keys_name(part)).num_rows for part in parts)
    previous_errors = [json.loads(line) for line in embeddings.errors_file.read_text().splitlines()]
    if not num_rows and errors == previous_errors:  # the same images failed again
        addition.discard()
        return artifact
    images = embeddings.num_rows + num_rows
    return addition.publish(
        {**artifact.summary, "images": images, "errors": len(errors), "added": num_rows}
    )


def _new_entries(source: Source, embeddings: EmbeddingsArtifact) -> Entries:
    """Returns the images that have yet to be embedded."""
    stored_keys = pa.chunked_array([pa.array(embeddings.keys, pa.large_string())])
    is_new = np.ones(len(source.entries), dtype=np.bool_)
    indices = source.entries.find(stored_keys)
    is_new[indices[indices >= 0]] = False
    return source.entries.select(np.flatnonzero(is_new))


def _check_compatible(artifact: Artifact, parent: Parent, encoder: Encoder) -> None:
    if artifact.fingerprint != encoder.fingerprint:
        raise ConfigInvalid(
            f"{artifact.path} was made with another model ({str(artifact.fingerprint)[:12]}, got"
            f" {encoder.fingerprint[:12]})",
            remedy="give the --model that it was made with, or embed all images again",
        )
    recorded, requested = (
        (artifact.config["engine"], artifact.config["precision"]),
        (encoder.engine, encoder.precision),
    )
    if recorded != requested:
        raise ConfigInvalid(
            f"{artifact.path} was made by {recorded[0]} in {recorded[1]}, not by {requested[0]}"
            f" in {requested[1]}",
            remedy=f"give --engine {recorded[0]} --precision {recorded[1]}, or embed all images"
            " again",
        )
    if any(origin.role == "selection" for origin in artifact.parents):
        raise ConfigInvalid(
            f"{artifact.path} contains the images of a selection, which cannot be extended",
            remedy="embed all images to another output",
        )
    locations = [origin.path for origin in artifact.parents if origin.role == "images"]
    if locations != [parent.path]:
        raise InvalidInput(
            f"{artifact.path} must be extended with images at {' and '.join(locations)}"
            f" (relative to it), got {parent.path}",
            remedy="add the new images there and give that path, or embed them to another output",
        )
