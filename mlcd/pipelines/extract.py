"""Writes the images that a selection keeps: as links, tar shards or parquet files."""

import errno
import io
import json
import logging
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifacts.draft import Draft, find_published
from mlcd.artifacts.manifest import Request
from mlcd.artifacts.selection import Selection
from mlcd.errors import Conflict, ImageRejected, InvalidInput, NotFound
from mlcd.images.captions import Captions, read_captions
from mlcd.images.entries import Entry
from mlcd.images.folder import FolderSource
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.locations import is_url
from mlcd.pipelines.embedded_images import read_images_place
from mlcd.pipelines.encoded import check_outside, images_parent
from mlcd.pipelines.used_embeddings import open_used_embeddings
from mlcd.progress import Meter, Stages
from mlcd.types import SampleKey

_log = logging.getLogger(__name__)

Form = Literal["links", "tar", "parquet"]
_SHARD_IMAGES: Final = 4096
_GROUP_ROWS: Final = 64  # a reader loads one row group at a time
_SCHEMA: Final = pa.schema(
    [
        ("key", pa.large_string()),
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("class_name", pa.string()),
        ("captions", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True)
class KeptImages:
    """The images that a selection keeps.

    everything: all images that the selection was made from. captions: captions of all of them.
    """

    source: Source
    everything: Source
    captions: Captions | None = None

    @classmethod
    def open(cls, selection: Selection, images: str | None) -> "KeptImages":
        """Opens the images at `images`; None for the location recorded in the embeddings. Raises
        NotFound.
        """
        place = images or read_images_place(open_used_embeddings(selection.artifact, None))
        kept_keys, source = selection.read_keys(), open_source(place)
        missing = source.entries.find(kept_keys) < 0
        if missing.any():
            raise NotFound(
                f"{place} lacks the image {kept_keys[int(missing.argmax())].as_py()}",
                remedy="put it back, or give the location of the images with --images",
            )
        return cls(source.only(kept_keys), source)

    def read(self, entry: Entry) -> bytes:
        try:
            return self.source.read(entry)
        except ImageRejected as error:
            raise NotFound(
                f"{entry.key} of {self.source.location} cannot be read: {error.message}",
                remedy="restore it, or curate again with --issues to leave it out",
            ) from error

    def with_captions(self) -> "KeptImages":
        captions = read_captions(self.everything, self.everything.entries)
        if captions.unmatched.num:
            _log.warning("captions of %s: %s", self.source.location, captions.unmatched)
        return replace(self, captions=captions)

    def captions_of(self, entries: Sequence[Entry]) -> dict[SampleKey, list[str]]:
        """Returns the captions of each image by key; empty lists if captions were not read."""
        if self.captions is None:
            return {entry.key: [] for entry in entries}
        keys = pa.chunked_array([pa.array([entry.key for entry in entries], pa.large_string())])
        places = self.everything.entries.find(keys).tolist()
        return {
            entry.key: list(self.captions.of(place))
            for entry, place in zip(entries, places, strict=True)
        }


def extract(
    selection: Selection, out: Path, form: Form, reporter: Stages, *, images: str | None = None
) -> int:
    """Writes the images that a selection keeps to `out`, and returns their number.

    A call that was killed resumes when repeated; tar shards and parquet files have the same bytes.
    Raises InvalidInput for links to images that are not local files, NotFound for a missing image,
    Conflict if `out` is something else.
    """
    images_to_write = KeptImages.open(selection, images)
    check_outside(images_to_write.source.location, out)
    parents = (
        selection.artifact.as_parent_of(out, "selection"),
        images_parent(images_to_write.source, out),
    )
    request = Request("images", {"form": form, "shard_images": _SHARD_IMAGES}, parents)
    num_images = len(images_to_write.source.entries)
    if form == "links":
        if out.exists():
            raise Conflict(f"{out} exists", remedy="give another directory")
        with Draft(out, request) as draft, reporter.stage("link", num_images) as meter:
            _link_all(images_to_write, draft.path, meter)
            draft.hand_over()
        return num_images
    if find_published(out, request) is None:
        with Draft(out, request) as draft, reporter.stage("write", num_images) as meter:
            _write_shards(images_to_write.with_captions(), draft, form, meter)
            draft.publish(summary={"images": num_images})
    return num_images


def _link_all(images: KeptImages, folder: Path, meter: Meter) -> None:
    source = images.source
    if not isinstance(source, FolderSource) or is_url(source.location):
        raise InvalidInput(
            f"links need images that are files on this disk, got {source.location}",
            remedy="write copies with --as tar or --as parquet",
        )
    for entry, path in zip(source.entries, source.files_of(source.entries), strict=True):
        link = folder / entry.key
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not link.exists():
                os.link(path, link)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                raise
            raise InvalidInput(
                f"{path} cannot be linked from {folder.parent}",
                remedy="give an output on the same file system, or use --as tar or --as parquet",
            ) from error
        meter.advance()


def _write_shards(images: KeptImages, draft: Draft, form: Form, meter: Meter) -> None:
    entries = images.source.entries
    for start in range(0, len(entries), _SHARD_IMAGES):
        shard = entries[start : start + _SHARD_IMAGES]
        name = f"images-{start // _SHARD_IMAGES:05d}.{form}"
        if draft.has(name):
            meter.advance(len(shard))
            continue
        with draft.write(name) as path:
            if form == "tar":
                _write_tar(images, list(shard), start, path, meter)
            else:
                _write_parquet(images, list(shard), path, meter)


def _write_tar(
    images: KeptImages, entries: list[Entry], start: int, path: Path, meter: Meter
) -> None:
    """Writes a shard in the layout of webdataset. start: number of the first sample, its name."""
    captions = images.captions_of(entries)
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for number, entry in enumerate(entries, start):
            for suffix, data in _list_members(images, entry, captions[entry.key]):
                member = tarfile.TarInfo(f"{number:09d}{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
            meter.advance()


def _list_members(
    images: KeptImages, entry: Entry, captions: list[str]
) -> Iterator[tuple[str, bytes]]:
    yield PurePosixPath(entry.key).suffix.lower() or ".image", images.read(entry)
    if entry.class_name is not None:
        yield ".cls", entry.class_name.encode()
    facts = {"key": entry.key, "captions": captions}
    yield ".json", json.dumps({name: value for name, value in facts.items() if value}).encode()


def _write_parquet(images: KeptImages, entries: list[Entry], path: Path, meter: Meter) -> None:
    captions = images.captions_of(entries)
    with pq.ParquetWriter(path, _SCHEMA) as writer:
        for start in range(0, len(entries), _GROUP_ROWS):
            group = entries[start : start + _GROUP_ROWS]
            rows = [
                {
                    "key": entry.key,
                    "image": {"bytes": images.read(entry), "path": entry.key},
                    "class_name": entry.class_name,
                    "captions": captions[entry.key] or None,
                }
                for entry in group
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA))
            meter.advance(len(group))
