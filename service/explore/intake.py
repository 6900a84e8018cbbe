"""Updates a collection from a place: embeds new and changed pictures, deletes missing ones."""

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
from mlcd.pipelines.stored_rows import StoredRows
from mlcd.randomness import hash_counters
from mlcd.service.explore.progress_board import ProgressBoard
from mlcd.service.explore.seen_pictures import FileStamp, SeenPicture, SeenPictures, read_stamps
from mlcd.types import SampleKey

_FIRST_BLOCK: Final = 4  # pictures in the first block, so that the page soon shows some
_BLOCK: Final = 64  # pictures per transaction; a kill loses at most these
_NUM_NEWEST: Final = 128  # newest pictures that the page shows during the intake


@dataclass(frozen=True)
class PictureIntake:
    """Adds the pictures of `source` to `collection`.

    stored_rows: the rows of the pictures where the model is absent, else None. pictures: list of
    pictures that were processed. check: called after every picture; an error that
    it raises ends the work, which the next run continues.
    """

    source: Source
    collection: CollectionPort
    encoder: Encoder
    stored_rows: StoredRows | None
    pictures: SeenPictures
    board: ProgressBoard
    check: Callable[[], None]
    thumbnail_side: int

    def run(self) -> int:
        """Updates the collection to the present pictures of the place.

        Returns the number of pictures that were processed or deleted.
        """
        entries = self.source.entries
        keys = list(entries.keys())
        stamps = dict(zip(keys, read_stamps(self.source, entries), strict=True))
        collection_keys = {item.id for block in self.collection.items() for item in block}
        missing = [key for key in {*collection_keys, *self.pictures.by_key} if key not in stamps]
        self._delete([key for key in missing if key in collection_keys])
        self.pictures.forget(missing)
        self._show_newest([key for key in keys if key in collection_keys][-_NUM_NEWEST:])
        new = [
            index
            for index, key in enumerate(keys)
            if self._is_new(key, stamps[key], collection_keys)
        ]
        self.board.begin("embed", len(new))
        self._show_counts()
        selected = entries.select(_shuffle(np.array(new, np.int64)))
        done = 0
        with self.source.ahead(selected):
            for block in _blocks(selected):
                self._add(block, stamps)
                done += len(block)
                self.board.advance(done)
                self._show_counts()
        return len(missing) + len(new)

    def _is_new(self, key: SampleKey, stamp: FileStamp, collection_keys: set[str]) -> bool:
        picture = self.pictures.by_key.get(key)
        if picture is None or picture.stamp != stamp:
            return True
        # A processed picture that is not in the collection was deleted by a user, unless the
        # collection is empty: then it was lost.
        return picture.reason is None and not collection_keys

    def _add(self, entries: Entries, stamps: dict[SampleKey, FileStamp]) -> None:
        """Embeds pictures and adds them to the collection, durably."""
        threads = available_cores()
        if self.stored_rows is None:
            part = encode_entries(
                self.source,
                entries,
                self.encoder,
                num_threads=threads,
                on_done=lambda *_: self.check(),
            )
        else:
            self.check()
            part = self.stored_rows.encode_entries(self.source, entries)
        processed = {
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
                processed[entry.key] = SeenPicture(stamp, "", "unusable-name", str(error))
                continue
            items.append(Item(entry.key, row, metadata, thumbnail))
            processed[entry.key] = SeenPicture(stamp, sha256.hex())
        if items:
            self.collection.add(items)
            self._show_newest([item.id for item in items])
        # the file of a picture in the collection may now be unusable
        self._delete([error["key"] for error in part.errors])
        self.pictures.add(processed)

    def _show_newest(self, keys: list[SampleKey]) -> None:
        versions = self.collection.thumbnail_versions(keys)
        self.board.show(newest=tuple(zip(keys, versions, strict=True)))

    def _delete(self, keys: list[SampleKey]) -> None:
        if keys:
            self.collection.delete_all(keys)

    def _show_counts(self) -> None:
        skipped = len(self.pictures.list_skipped())
        self.board.show(pictures=len(self.collection), skipped=skipped)


def _positions(entries: Entries, subset: list[Entry]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    keys = pa.chunked_array([pa.array([entry.key for entry in subset], pa.large_string())])
    return entries.find(keys).astype(np.int64)


def _shuffle(
    indices: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns the indices in a deterministic random order, so that any prefix is a fair sample."""
    return indices[np.argsort(hash_counters(0, indices.astype(np.uint64)), kind="stable")]


def _blocks(entries: Entries) -> Iterator[Entries]:
    """Yields the pictures in blocks, of which the first is small."""
    start, size = 0, _FIRST_BLOCK
    while start < len(entries):
        yield entries[start : start + size]
        start, size = start + size, _BLOCK
