"""Encodes images part by part, for every pipeline that starts from images.

A part is a run of consecutive entries of the source. Its bytes depend only on the source, the
model and the sizes below, not on the process that makes it.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import pyarrow.parquet as pq

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.embeddings import ERRORS, keys_name
from mlcd.artifacts.manifest import Artifact, Parent
from mlcd.encoders.encoder import Encoder, job_batch
from mlcd.errors import ImageRejected, InvalidInput
from mlcd.images.entries import Entry
from mlcd.images.prefetch import Prepared, prepare_all
from mlcd.images.source import ListingProblem, Source
from mlcd.locations import is_url, relative_location, url_of
from mlcd.types import Embeddings, ImageBatch

PART_ENTRIES: Final = 2048
_MIN_PART_ENTRIES: Final = 256
_MIN_PARTS: Final = 16
# called after every image with the part's number of (images done, images without an embedding)
OnDone: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class EncodedPart:
    """The n usable images of a part, and the errors of its other images.

    entries, image_sha256, embeddings (float32 [n, D] unit rows): one per usable image.
    """

    entries: list[Entry]
    image_sha256: list[bytes]
    embeddings: Embeddings
    errors: list[dict[str, str]]


def check_source(source: Source, out: Path) -> None:
    """Raises InvalidInput for an empty source, and if `out` is inside the images' folder."""
    check_outside(source.location, out)
    source.check_not_empty()


def check_outside(images: str, out: Path) -> None:
    """Raises InvalidInput if `out` lies inside the location of the images."""
    if is_url(images):
        is_inside = f"{url_of(out)}/".startswith(f"{images.rstrip('/')}/")
    else:
        folder = Path(images).resolve()
        is_inside = folder.is_dir() and out.resolve().is_relative_to(folder)
    if is_inside:
        raise InvalidInput(
            f"{out} lies inside the images {images}", remedy="give an output elsewhere"
        )


def encode_entries(
    source: Source,
    entries: Sequence[Entry],
    encoder: Encoder,
    *,
    num_threads: int,
    on_done: OnDone,
    in_flight: int = 1,
) -> EncodedPart:
    """Decodes and encodes these entries; decoding runs ahead. Batches depend only on the entries.

    in_flight: number of batches submitted at once, for an encoder in another process.
    """
    part = _PartBuilder(encoder)
    prepared = prepare_all(
        source,
        entries,
        encoder.preprocess,
        num_threads=num_threads,
        ahead=2 * job_batch(encoder),
    )
    for batch, rows in _encode(encoder, _batches(prepared, len(entries), part, on_done), in_flight):
        part.add(batch, rows)
    return part.finish()


def _batches(
    images: Iterable[Prepared], num_images: int, part: "_PartBuilder", on_done: OnDone
) -> Iterator[list[Prepared]]:
    """Yields batches of the images; calls `on_done` for a batch's last image after the batch is
    encoded.
    """
    batch: list[Prepared] = []
    size = job_batch(part.encoder)
    for done, prepared in enumerate(images, 1):
        if prepared.rejection is not None:
            part.reject(prepared.entry, prepared.rejection)
        else:
            batch.append(prepared)
        if len(batch) == size or (batch and done == num_images):
            yield batch
            batch = []
        on_done(done, len(part.errors))


def _encode(
    encoder: Encoder, batches: Iterator[list[Prepared]], in_flight: int
) -> Iterator[tuple[list[Prepared], Embeddings]]:
    """Yields every batch with its rows, in order."""
    # in this thread, because an engine's thread budget may belong to the thread that opened it
    if in_flight == 1:
        for batch in batches:
            yield batch, encoder.encode(_stack(batch))
        return
    with ThreadPoolExecutor(in_flight, thread_name_prefix="encode") as pool:
        pending: deque[tuple[list[Prepared], Future[Embeddings]]] = deque()
        for batch in batches:
            pending.append((batch, pool.submit(encoder.encode, _stack(batch))))
            if len(pending) == in_flight:
                done, rows = pending.popleft()
                yield done, rows.result()
        while pending:
            done, rows = pending.popleft()
            yield done, rows.result()


def _stack(batch: list[Prepared]) -> ImageBatch:
    return np.stack([prepared.pixels for prepared in batch if prepared.pixels is not None])


@dataclass
class _PartBuilder:
    encoder: Encoder
    entries: list[Entry] = field(default_factory=list)
    image_sha256: list[bytes] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)

    def reject(self, entry: Entry, rejection: ImageRejected) -> None:
        self.errors.append(
            {"key": entry.key, "reason": rejection.reason, "detail": rejection.message}
        )

    def add(self, batch: list[Prepared], rows: Embeddings) -> None:
        for prepared, row in zip(batch, rows, strict=True):
            if row.any():
                self.rows.append(row)
                self.entries.append(prepared.entry)
                self.image_sha256.append(prepared.sha256)
            else:
                detail = f"{self.encoder.name} finds nothing in this image to describe"
                self.reject(prepared.entry, ImageRejected("no-embedding", detail))

    def finish(self) -> EncodedPart:
        rows = (
            np.stack(self.rows) if self.rows else np.zeros((0, self.encoder.dimension), np.float32)
        )
        return EncodedPart(self.entries, self.image_sha256, rows, self.errors)


def choose_part_entries(num_entries: int) -> int:
    """Returns the number of images per part: 2,048, or fewer for less than 32,768 images, so that
    several workers can share them.
    """
    share = _MIN_PART_ENTRIES * -(-num_entries // (_MIN_PART_ENTRIES * _MIN_PARTS))
    return min(PART_ENTRIES, max(_MIN_PART_ENTRIES, share))


def part_sizes(num_entries: int, part_entries: int) -> list[int]:
    """Returns the number of images of each part."""
    return [min(part_entries, num_entries - start) for start in range(0, num_entries, part_entries)]


def part_slice(part: int, part_entries: int) -> slice:
    """Returns the range of the part among all entries."""
    return slice(part * part_entries, (part + 1) * part_entries)


def errors_name(part: int) -> str:
    """Returns the name of the part's hidden file of errors in the draft; publishing removes it."""
    return f".errors-{part:05d}.jsonl"


def write_errors(draft: Draft, part: int, errors: list[dict[str, str]]) -> None:
    with draft.write(errors_name(part)) as path:
        path.write_text("".join(json.dumps(error) + "\n" for error in errors))


def num_errors(draft: Draft, part: int) -> int:
    """Returns the number of errors of a finished part."""
    return len(draft.file(errors_name(part)).read_text().splitlines())


def merge_errors(
    draft: Draft, parts: Iterable[int], problems: Iterable[ListingProblem] = (), name: str = ERRORS
) -> list[dict[str, str]]:
    """Returns all errors in the order of the source, and writes them to the artifact's
    file `name`.

    problems: problems of listing the source, which come first.
    """
    errors = [
        {"key": problem.key, "reason": "unreadable", "detail": problem.detail}
        for problem in problems
    ]
    for part in parts:
        lines = (draft.path / errors_name(part)).read_text().splitlines()
        errors.extend(json.loads(line) for line in lines)
    with draft.write(name) as path:
        path.write_text("".join(json.dumps(error) + "\n" for error in errors))
    return errors


def publish_rows(
    draft: Draft, num_parts: int, *, inputs: str, unit: str, dimension: int, model: str
) -> Artifact:
    """Publishes the parts of a draft as embeddings.

    inputs: what was embedded, for the error. unit: what a row stands for, a field of the summary.
    Raises InvalidInput if there are no rows.
    """
    errors = merge_errors(draft, range(num_parts))
    num_rows = sum(
        pq.read_metadata(draft.path / keys_name(part)).num_rows for part in range(num_parts)
    )
    if num_rows == 0:
        raise InvalidInput(
            f"none of the {inputs} can be used",
            remedy=f"fix the first, {errors[0]['key']}: {errors[0]['detail']}",
        )
    summary = {unit: num_rows, "errors": len(errors), "dimension": dimension, "model": model}
    return draft.publish(summary=summary)


def num_listed(errors: Path, keys: Iterable[str]) -> int:
    """Returns how many of the keys an artifact's errors.jsonl lists."""
    num_by_key = Counter(json.loads(line)["key"] for line in errors.read_text().splitlines())
    return sum(num_by_key[key] for key in keys)


class NoUsableImage(InvalidInput):
    """All images were read, and none is usable."""


def no_usable_image(source: Source, errors: list[dict[str, str]]) -> NoUsableImage:
    return NoUsableImage(
        f"none of the {len(source.entries)} files in {source.location} is a usable image",
        remedy=f"fix the first, {errors[0]['key']}: {errors[0]['detail']}",
    )


def images_parent(source: Source, out: Path, listing: str | None = None) -> Parent:
    """Returns the images as a parent: a relative path (or glob) on this machine, else the URL.

    listing: digest of the listing; None to compute it.
    """
    location = (
        source.location
        if is_url(source.location)
        else relative_location(Path(source.location), out)
    )
    return Parent("images", location, listing or source.listing_digest())
