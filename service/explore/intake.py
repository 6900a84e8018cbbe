"""The pictures of a place to a collection: new and changed ones are embedded, gone ones deleted."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from mlcd.collections.item import Item, check_new_id, encode_metadata
from mlcd.collections.port import CollectionPort
from mlcd.cores import available_cores
from mlcd.encoders.encoder import Encoder
from mlcd.errors import InvalidInput
from mlcd.images.entries import Entries, Entry
from mlcd.images.prefetch import thumbnails_all
from mlcd.images.source import Source
from mlcd.pipelines.encoded import encode_entries
from mlcd.randomness import hash_counters
from mlcd.service.explore.progress_board import ProgressBoard
from mlcd.service.explore.seen_pictures import FileStamp, SeenPicture, SeenPictures, stamps_of
from mlcd.types import SampleKey

_FIRST_BLOCK: Final = 4  # pictures until something is to be seen
_BLOCK: Final = 64  # pictures of one transaction, which is what a kill loses
_NEWEST: Final = 128  # pictures that the page is told of while others are looked at


@dataclass(frozen=True)
class PictureIntake:
    """The pictures of `source` on their way into `collection`.

    check: called after every picture; what it raises ends the work, and the next run goes on.
    """

    source: Source
    collection: CollectionPort
    encoder: Encoder
    pictures: SeenPictures
    board: ProgressBoard
    check: Callable[[], None]
    thumbnail_side: int

    def run(self) -> int:
        """Brings the collection to what the place holds now.

        Returns how many pictures were looked at or deleted.
        """
        entries = self.source.entries
        keys = list(entries.keys())
        stamps = dict(zip(keys, stamps_of(self.source, entries), strict=True))
        held_keys = {item.id for block in self.collection.items() for item in block}
        lost_keys = [key for key in {*held_keys, *self.pictures.by_key} if key not in stamps]
        self._delete([key for key in lost_keys if key in held_keys])
        self.pictures.forget(lost_keys)
        self._show_newest([key for key in keys if key in held_keys][-_NEWEST:])
        new = [at for at, key in enumerate(keys) if self._is_new(key, stamps[key], held_keys)]
        self.board.begin("embed", len(new))
        self._show()
        selected = entries.select(_shuffle(np.array(new, np.int64)))
        done = 0
        with self.source.ahead(selected):
            for block in _blocks(selected):
                self._take(block, stamps)
                done += len(block)
                self.board.advance(done)
                self._show()
        return len(lost_keys) + len(new)

    def _is_new(self, key: SampleKey, stamp: FileStamp, held_keys: set[str]) -> bool:
        picture = self.pictures.by_key.get(key)
        # one that was looked at and is not held was deleted by a person, unless all are gone
        if picture is None or picture.stamp != stamp:
            return True
        return picture.reason is None and not held_keys

    def _take(self, entries: Entries, stamps: dict[SampleKey, FileStamp]) -> None:
        """Embeds some pictures and adds them to the collection; then they are durable."""
        threads = available_cores()
        part = encode_entries(
            self.source,
            entries,
            self.encoder,
            num_threads=threads,
            on_done=lambda *_: self.check(),
        )
        looked_at = {
            error["key"]: SeenPicture(stamps[error["key"]], "", error["reason"], error["detail"])
            for error in part.errors
        }
        usable = entries.select(_positions(entries, part.entries))
        thumbnails = thumbnails_all(
            self.source, usable, side=self.thumbnail_side, num_threads=threads
        )
        items = []
        for (entry, thumbnail), row, sha256 in zip(
            thumbnails, part.embeddings, part.image_sha256, strict=True
        ):
            metadata = {} if entry.class_name is None else {"class_name": entry.class_name}
            stamp = stamps[entry.key]
            try:
                check_new_id(entry.key)
                encode_metadata(entry.key, metadata)
            except InvalidInput as error:
                looked_at[entry.key] = SeenPicture(stamp, "", "unusable-name", str(error))
                continue
            items.append(Item(entry.key, row, metadata, thumbnail))
            looked_at[entry.key] = SeenPicture(stamp, sha256.hex())
        if items:
            self.collection.add(items)
            self._show_newest([item.id for item in items])
        # a picture that was overwritten by something unusable must not stay
        self._delete([error["key"] for error in part.errors])
        self.pictures.add(looked_at)

    def _show_newest(self, keys: list[SampleKey]) -> None:
        versions = self.collection.thumbnail_versions(keys)
        self.board.show(newest=tuple(zip(keys, versions, strict=True)))

    def _delete(self, keys: list[SampleKey]) -> None:
        if keys:
            self.collection.delete_all(keys)

    def _show(self) -> None:
        skipped = len(self.pictures.list_skipped())
        self.board.show(pictures=len(self.collection), skipped=skipped)


def _positions(entries: Entries, chosen: list[Entry]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    keys = pa.chunked_array([pa.array([entry.key for entry in chosen], pa.large_string())])
    return entries.find(keys).astype(np.int64)


def _shuffle(
    indices: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns the indices in an order in which the first ones are a fair sample of all."""
    return indices[np.argsort(hash_counters(0, indices.astype(np.uint64)), kind="stable")]


def _blocks(entries: Entries) -> Iterator[Entries]:
    """Yields the pictures in blocks, a small one first."""
    start, size = 0, _FIRST_BLOCK
    while start < len(entries):
        yield entries[start : start + size]
        start, size = start + size, _BLOCK
