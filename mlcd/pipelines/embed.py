"""Encodes images into an embeddings artifact."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.embeddings import KEY_SCHEMA, keys_name, part_name
from mlcd.artifacts.manifest import Artifact, Parent, Request
from mlcd.artifacts.selection import Selection
from mlcd.cores import available_cores
from mlcd.encoders.encoder import Encoder, job_batch
from mlcd.images.entries import Entries
from mlcd.images.prefetch import thumbnails_all
from mlcd.images.source import Source
from mlcd.keys import split_positions
from mlcd.pipelines.encoded import (
    EncodedPart,
    OnDone,
    check_source,
    choose_part_entries,
    encode_entries,
    errors_name,
    images_parent,
    merge_errors,
    no_usable_image,
    part_sizes,
    part_slice,
    write_errors,
)
from mlcd.pipelines.ownership import take_over
from mlcd.pipelines.thumbnail_parts import write_thumbnails
from mlcd.progress import Stages
from mlcd.types import SampleKey

if TYPE_CHECKING:  # imports the package tokenizers, which images alone do not need
    from mlcd.pipelines.fuse_captions import Fusion


def embed(
    source: Source,
    encoder: Encoder,
    out: Path,
    reporter: Stages,
    *,
    selection: Selection | None = None,
    fusion: "Fusion | None" = None,
) -> Artifact:
    """Encodes all images of `source`, or the images that a selection keeps. Lists unusable images
    in errors.jsonl. fusion: fuses each row with that of the image's caption.

    Work is committed in parts of consecutive entries: a rerun after a crash starts at the first
    unfinished part and ends with the same bytes. Raises InvalidInput if no image is usable.
    """
    embedding = Embedder(
        source,
        encoder,
        out,
        num_threads=available_cores(),
        selection=selection,
        fusion=fusion,
    )
    if (done := find_published(out, embedding.request)) is not None:
        return done
    num_parts = len(embedding.sizes)
    with Draft(out, embedding.request) as draft:
        take_over(draft)
        finished = next(
            (part for part in range(num_parts) if not embedding.has(draft, part)), num_parts
        )
        start = sum(embedding.sizes[:finished])
        with (
            reporter.stage("embed", sum(embedding.sizes), done=start) as meter,
            embedding.source.ahead(embedding.source.entries[start:]),
        ):
            for part in range(finished, num_parts):
                embedding.make(draft, part, lambda _, errors: meter.advance(1, errors=errors))
        return embedding.publish(draft)


class Embedder:
    """A request for embeddings, which can make any part of the artifact."""

    def __init__(
        self,
        source: Source,
        encoder: Encoder,
        out: Path,
        *,
        num_threads: int,
        part_entries: int | None = None,
        in_flight: int = 1,
        thumbnail_side: int | None = None,
        selection: Selection | None = None,
        fusion: "Fusion | None" = None,
    ) -> None:
        """num_threads: number of decoding threads. in_flight: see `encode_entries`. thumbnail_side:
        pixels of the thumbnails to write with each part; None for none. selection: the images to
        encode; None for all. part_entries: images per part, by default `choose_part_entries`.
        Raises InvalidInput for an empty source.
        """
        check_source(source, out)
        self._full_source = source
        self.source = source if selection is None else source.only(selection.read_keys())
        num_entries = len(self.source.entries)
        self._encoder, self._fusion = encoder, fusion
        self._part_entries = part_entries or choose_part_entries(num_entries)
        self._num_threads, self._in_flight = num_threads, in_flight
        self._thumbnail_side = thumbnail_side
        engine = {"precision": encoder.precision, "engine": encoder.engine}
        self.request = Request(
            "embeddings",
            {
                **engine,
                **source.config,
                "part_entries": self._part_entries,
                "batch": job_batch(encoder),
                **(fusion.config if fusion else {}),
            },
            tuple(self._parents(out, selection)),
            fusion.fingerprint(encoder.fingerprint) if fusion else encoder.fingerprint,
        )
        self.sizes = part_sizes(num_entries, self._part_entries)

    def _parents(self, out: Path, selection: Selection | None) -> Iterator[Parent]:
        yield images_parent(self.source, out)
        if selection is not None:
            yield selection.artifact.as_parent_of(out, "selection")
        if self._fusion is not None:
            yield self._fusion.parent_of(out)

    def entries(self, part: int) -> Entries:
        return self.source.entries[part_slice(part, self._part_entries)]

    def prepare(self, draft: Draft) -> None: ...

    def has(self, draft: Draft, part: int) -> bool:
        """Tells whether the part is finished."""
        return draft.has(errors_name(part))

    def make(self, draft: Draft, part: int, on_done: OnDone) -> None:
        """Writes one part. The file of errors comes last and marks the part as finished."""
        if self._thumbnail_side is not None:
            thumbnails = thumbnails_all(
                self.source,
                self.entries(part),
                side=self._thumbnail_side,
                num_threads=self._num_threads,
            )
            write_thumbnails(draft, part, thumbnails, lambda: on_done(0, 0))
        encoded = encode_entries(
            self.source,
            self.entries(part),
            self._encoder,
            num_threads=self._num_threads,
            on_done=on_done,
            in_flight=self._in_flight,
        )
        if self._fusion is not None:
            encoded = self._fusion.fuse(encoded, self._captions)
        splits = self._splits[part_slice(part, self._part_entries)].tolist()
        split_of = dict(zip(self.entries(part).keys(), splits, strict=True))
        write_encoded(draft, part, encoded, split_of)

    @cached_property
    def _captions(self) -> dict[str, object]:
        return self._fusion.match(self._full_source) if self._fusion is not None else {}

    @cached_property
    def _splits(self) -> NDArray[np.float64]:
        """Split position of each image, computed over the full source as in every other step."""
        entries = self._full_source.entries
        splits = split_positions(entries.keys(), entries.class_names())
        if self.source is self._full_source:
            return splits
        keys = pa.chunked_array([list(self.source.entries.keys())], pa.large_string())
        return splits[entries.find(keys)]

    def publish(self, draft: Draft) -> Artifact:
        """Publishes the draft, whose parts are all finished. Raises InvalidInput if no image was
        usable.
        """
        num_parts = len(self.sizes)
        errors = merge_errors(draft, range(num_parts), self.source.problems)
        num_rows = sum(
            pq.read_metadata(draft.path / keys_name(part)).num_rows for part in range(num_parts)
        )
        if num_rows == 0:
            raise no_usable_image(self.source, errors)
        dimension = self._encoder.dimension
        summary = {
            "images": num_rows,
            "errors": len(errors),
            "dimension": self._fusion.dimension(dimension) if self._fusion else dimension,
            "model": self._encoder.name,
        }
        return draft.publish(summary=summary)


def write_encoded(
    draft: Draft, part: int, encoded: EncodedPart, split_of: Mapping[SampleKey, float]
) -> None:
    """Writes one part: rows, keys, and last the errors, which mark the part as finished."""
    keys = [
        {
            "key": entry.key,
            "class_name": entry.class_name,
            "sha256": sha256,
            "split": split_of[entry.key],
        }
        for entry, sha256 in zip(encoded.entries, encoded.image_sha256, strict=True)
    ]
    with draft.all_or_none(errors_name(part)):
        with draft.write(part_name(part)) as path, path.open("wb") as file:
            np.save(file, encoded.embeddings, allow_pickle=False)
        with draft.write(keys_name(part)) as path:
            pq.write_table(pa.Table.from_pylist(keys, schema=KEY_SCHEMA), path)
        write_errors(draft, part, encoded.errors)
