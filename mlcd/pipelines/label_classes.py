"""Labels images from other sources than clusters: with the classes of folders, or any ids.

The artifact has the format of `mlcd label`, without centers; training accepts both.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.labels import NAMES, part_name, write_part
from mlcd.artifacts.manifest import Artifact, Request
from mlcd.errors import ImageRejected, InvalidInput
from mlcd.images.dataset_parts import describe_parts, parts_of_classes, propose_parts
from mlcd.images.entries import Entry
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.pipelines.encoded import (
    check_source,
    images_parent,
    merge_errors,
    no_usable_image,
    write_errors,
)
from mlcd.progress import Reporter
from mlcd.types import Neighbors

PART_ENTRIES: Final = 4096
# Returns an entry's label ids, best first, with their scores; empty for no label.
LabelsOf = Callable[[Entry], Sequence[tuple[int, float]]]


def label_classes(images: str, out: Path, reporter: Reporter) -> Artifact:
    """Labels each image with the class that its folder or its shard names.

    Raises InvalidInput for fewer than two classes, and if the folders are parts of a data set
    (such as train and val): each class would become several.
    """
    source = open_source(images)
    names = sorted({name for name in source.entries.class_names() if name is not None})
    if len(names) < 2:
        raise InvalidInput(
            f"labels need at least 2 classes of images, got {len(names)} in {images}",
            remedy="put the images of each class into a separate folder",
        )
    if parts := parts_of_classes(names):
        first = min(parts)
        raise InvalidInput(
            f"{describe_parts(images, parts)}, which would make {len(names)} classes",
            remedy=f"label a single part, such as {images.rstrip('/')}/{first}; in `mlcd evaluate`"
            f" {propose_parts(images, parts)}",
        )
    class_ids = {name: index for index, name in enumerate(names)}

    def class_of(entry: Entry) -> list[tuple[int, float]]:
        return [] if entry.class_name is None else [(class_ids[entry.class_name], 1.0)]

    facts = {"of": "classes"}
    return label_by(source, class_of, names, out, top=1, facts=facts, reporter=reporter)


def label_by(
    source: Source,
    labels_of: LabelsOf,
    names: Sequence[str],
    out: Path,
    *,
    top: int,
    facts: dict[str, Any],
    reporter: Reporter,
) -> Artifact:
    """Labels each image with the ids that `labels_of` returns for it, at most `top`.

    names: name of each label id. facts: what else the labels depend on; part of the request's
    identity in the manifest. A rerun after a crash makes only the missing parts.
    """
    check_source(source, out)
    config = {"num_centers": len(names), "top": top, "names_digest": _digest_names(names), **facts}
    request = Request("labels", config, (images_parent(source, out),))
    if (done := find_published(out, request)) is not None:
        return done
    parts = range(-(-len(source.entries) // PART_ENTRIES))
    with Draft(out, request) as draft, reporter.stage("label", len(source.entries)) as meter:
        num_rows = 0
        for part in parts:
            entries = source.entries[part * PART_ENTRIES : (part + 1) * PART_ENTRIES]
            num_rows += _write_labels(draft, part, source, list(entries), labels_of, top)
            meter.advance(len(entries))
        errors = merge_errors(draft, parts, source.problems)
        if num_rows == 0:
            raise no_usable_image(source, errors)
        draft.write_json(NAMES, list(names))
        summary = {"images": num_rows, "centers": len(names), "errors": len(errors)}
        return draft.publish(summary=summary)


def _write_labels(
    draft: Draft,
    part: int,
    source: Source,
    entries: list[Entry],
    labels_of: LabelsOf,
    top: int,
) -> int:
    """Writes one part unless it is there, and returns its number of readable images."""
    rows: list[tuple[Entry, bytes]] = []
    rejected: list[dict[str, str]] = []
    for entry in entries:
        try:
            rows.append((entry, hashlib.sha256(source.read(entry)).digest()))
        except ImageRejected as error:
            rejected.append({"key": entry.key, "reason": error.reason, "detail": error.message})
    ids = np.full((len(rows), top), -1, dtype=np.int32)
    scores = np.zeros((len(rows), top), dtype=np.float32)
    for row, (entry, _) in enumerate(rows):
        for column, (index, score) in enumerate(labels_of(entry)[:top]):
            ids[row, column], scores[row, column] = index, score
    if not draft.has(part_name(part)):
        keys, digests = [entry.key for entry, _ in rows], [digest for _, digest in rows]
        write_part(draft, part, keys, digests, Neighbors(ids, scores))
        write_errors(draft, part, rejected)
    return len(rows)


def _digest_names(names: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()
