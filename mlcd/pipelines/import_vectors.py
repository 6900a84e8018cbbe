"""Imports vectors that other programs made, as an embeddings artifact."""

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.manifest import Artifact, Parent, Request
from mlcd.errors import ImageRejected, InvalidInput
from mlcd.images.entries import Entry
from mlcd.images.matched_keys import match_keys
from mlcd.images.source import Source
from mlcd.keys import split_positions
from mlcd.locations import relative_location
from mlcd.pipelines.embed import write_encoded
from mlcd.pipelines.encoded import (
    PART_ENTRIES,
    EncodedPart,
    errors_name,
    images_parent,
    part_sizes,
    part_slice,
    publish_rows,
)
from mlcd.pipelines.ownership import take_over
from mlcd.pipelines.vector_files import Rows, VectorFile, digest_of_vectors
from mlcd.progress import Reporter
from mlcd.types import Fingerprint

# Rows whose norms differ from 1 by at most this are stored bit for bit.
_TOLERANCES: Final = {np.dtype(np.float16): 2e-3, np.dtype(np.float32): 1e-5}


@dataclass(frozen=True)
class _Row:
    """A row of the vectors. entry: its image; with a key alone if the images are not given."""

    number: int
    entry: Entry


def import_vectors(
    vectors: VectorFile,
    keys: list[str] | None,
    out: Path,
    reporter: Reporter,
    *,
    model_name: str,
    images: Source | None = None,
    part_entries: int = PART_ENTRIES,
) -> Artifact:
    """Writes vectors as unit rows, float16 if the vectors are, else float32.

    Rows of norm 1 keep their bits, and others are divided by their norms. errors.jsonl lists the
    rows that are not finite or 0, and with `images` the rows without an image and the images
    without a row. keys: one per row; None for those of the vectors, else the numbers of the rows.
    model_name: decides the fingerprint. images: give the rows their classes and digests.

    A rerun after a crash makes only the unfinished parts. Raises InvalidInput for keys that do not
    fit, and if no row can be used.
    """
    keys = keys or vectors.keys or [f"{number:08d}" for number in range(vectors.num_rows)]
    _check_keys(keys, vectors)
    rows, errors = _match_images(keys, images)
    if not rows:
        raise InvalidInput(
            f"none of the {vectors.num_rows} vectors has an image in {images and images.location}",
            remedy=f"give keys as the images have them; the first is {keys[0]}",
        )
    parents = [
        Parent("vectors", relative_location(vectors.path, out), digest_of_vectors(vectors.path))
    ]
    if images is not None:
        parents.append(images_parent(images, out))
    listed = hashlib.sha256("\0".join(keys).encode()).hexdigest()
    config = {"imported": True, "keys": listed, "part_entries": part_entries}
    fingerprint = _fingerprint_of(model_name, vectors.dimension)
    request = Request("embeddings", config, tuple(parents), fingerprint)
    if (finished := find_published(out, request)) is not None:
        return finished
    sizes = part_sizes(len(rows), part_entries)
    names = [row.entry.key for row in rows]
    splits = split_positions(names, [row.entry.class_name for row in rows]).tolist()
    split_of = dict(zip(names, splits, strict=True))
    with Draft(out, request) as draft:
        take_over(draft)
        missing = [part for part in range(len(sizes)) if not draft.has(errors_name(part))]
        with reporter.stage(
            "import", sum(sizes), done=len(rows) - sum(sizes[part] for part in missing)
        ) as meter:
            for part in missing:
                chosen = rows[part_slice(part, part_entries)]
                encoded = _read_part(chosen, vectors, images)
                if part == 0:
                    encoded.errors[:0] = errors
                write_encoded(draft, part, encoded, split_of)
                meter.advance(len(chosen))
        return publish_rows(
            draft,
            len(sizes),
            inputs=f"{vectors.num_rows} vectors of {vectors.path}",
            unit="images",
            dimension=vectors.dimension,
            model=model_name,
        )


def _fingerprint_of(model_name: str, dimension: int) -> Fingerprint:
    """Returns the fingerprint of vectors that the user says are of one model."""
    return hashlib.sha256(f"imported vectors\0{model_name}\0{dimension}".encode()).hexdigest()


def _check_keys(keys: list[str], vectors: VectorFile) -> None:
    if len(keys) != vectors.num_rows:
        raise InvalidInput(
            f"each vector must have one key, got {len(keys)} keys for {vectors.num_rows} vectors"
        )
    if not keys:
        raise InvalidInput(f"{vectors.path} must have at least 1 vector, got 0")
    seen: set[str] = set()
    for number, key in enumerate(keys):
        if not key or key in seen:
            fault = "is empty" if not key else f"{key} repeats an earlier one"
            raise InvalidInput(f"keys must be distinct: the key of row {number} {fault}")
        seen.add(key)


def _match_images(
    keys: list[str], images: Source | None
) -> tuple[list[_Row], list[dict[str, str]]]:
    """Returns the rows to import, and the errors of rows without an image and images without a
    row.
    """
    if images is None:
        return [_Row(number, Entry(key, None, 0, ())) for number, key in enumerate(keys)], []
    entries = images.entries
    column = pa.chunked_array([pa.array(keys, pa.large_string())])
    indices = match_keys(column, entries.key_column(), "the keys of the vectors").indices.tolist()
    rows, errors, used = [], [], set[int]()
    for number, (key, index) in enumerate(zip(keys, indices, strict=True)):
        if index < 0 or index in used:
            detail = (
                f"no image of {images.location} has this key"
                if index < 0
                else "another row has the same image"
            )
            errors.append({"key": key, "reason": "no-image", "detail": detail})
        else:
            used.add(index)
            rows.append(_Row(number, entries[index]))
    errors += [
        {"key": key, "reason": "no-vector", "detail": "no vector has this image's key"}
        for index, key in enumerate(entries.keys())
        if index not in used
    ]
    return rows, errors


def _read_part(rows: list[_Row], vectors: VectorFile, images: Source | None) -> EncodedPart:
    numbers = np.array([row.number for row in rows])
    first = int(numbers.min())
    values = vectors.read(first, int(numbers.max()) + 1)[numbers - first]
    units, is_usable = _to_units(values)
    digest = partial(_digest_of, images)
    kept: list[int] = []
    digests: list[bytes] = []
    errors: list[dict[str, str]] = []
    for index, row in enumerate(rows):
        if not is_usable[index]:
            detail = "the vector must be finite and not 0"
            errors.append({"key": row.entry.key, "reason": "no-embedding", "detail": detail})
            continue
        try:
            digests.append(digest(row.entry, units[index]))
        except ImageRejected as rejection:
            errors.append(
                {"key": row.entry.key, "reason": rejection.reason, "detail": rejection.message}
            )
        else:
            kept.append(index)
    return EncodedPart([rows[index].entry for index in kept], digests, units[kept], errors)


def _digest_of(images: Source | None, entry: Entry, row: NDArray[Any]) -> bytes:
    """Returns the SHA-256 of the image's bytes; of the row's, if the images are not given."""
    data = row.tobytes() if images is None else images.read(entry)
    return hashlib.sha256(data).digest()


def _to_units(rows: Rows) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Returns unit rows in float16 or float32, and which of them are usable."""
    dtype = np.dtype(np.float16 if rows.dtype == np.float16 else np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        norms = np.linalg.norm(rows.astype(np.float64), axis=1)
        is_usable = np.isfinite(norms) & (norms > 0)
        is_unit = np.abs(norms - 1) <= _TOLERANCES[dtype]
        units = (rows / np.where(is_unit, 1, norms)[:, np.newaxis]).astype(dtype)
    return np.where(is_unit[:, np.newaxis], rows.astype(dtype), units), is_usable
