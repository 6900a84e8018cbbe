"""Builds a collection shard by shard: each shard makes temporary embeddings, from which publishing
makes the collection.

OUT.partial/embeddings             as written by `mlcd embed`, with the thumbnails of each shard
OUT.partial/attempt-…/collection   made from the embeddings; finally renamed to OUT, then
                                   OUT.partial is deleted
OUT/errors.jsonl                   copied from the embeddings: the images that could not be used
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlcd.artifacts.disk import raise_if_disk_full, sync_path, translate_os_errors
from mlcd.artifacts.embeddings import ERRORS, EmbeddingsArtifact
from mlcd.artifacts.manifest import draft_path
from mlcd.collections.collection import Collection
from mlcd.collections.folder import GENERATIONS, LEDGER
from mlcd.collections.item import check_new_id, encode_metadata
from mlcd.errors import Conflict, InvalidInput
from mlcd.images.source import Source
from mlcd.pipelines.attempt import Attempt
from mlcd.pipelines.encoded import NoUsableImage, OnDone, images_parent, num_listed
from mlcd.pipelines.index import INDEX_STAGE, index, metadata_of
from mlcd.pipelines.ownership import claim, discard, give_up, owner_of, write_owner
from mlcd.pipelines.shard_parts import OutputGone, PartShards
from mlcd.pipelines.thumbnail_parts import read_thumbnails

# inside the draft of the collection, because only the draft may be created beside the output
EMBEDDINGS: Final = "embeddings"
_COLLECTION: Final = "collection"
_SHOWN_CHARS: Final = 40  # at either end of a long key


class CollectionShards:
    """The `Shards` protocol: makes embeddings; publishing makes a collection from them."""

    def __init__(
        self,
        embeddings: PartShards,
        source: Source,
        out: Path,
        owner: str,
        *,
        max_thumbnail_bytes: int,
    ) -> None:
        """embeddings: parts at `EMBEDDINGS` in the draft of `out`. max_thumbnail_bytes: limit on
        all thumbnails; items beyond the limit get none.
        """
        self._embeddings, self._source, self._out, self._owner = embeddings, source, out, owner
        self._draft, self._max_thumbnail_bytes = draft_path(out), max_thumbnail_bytes
        self.sizes, self.damaged_files = embeddings.sizes, embeddings.damaged_files

    def plan(self) -> None:
        self._check_items()
        if self._prepare_draft(claim_draft=True):
            self._embeddings.plan()

    def check(self) -> None:
        if self._prepare_draft():
            self._embeddings.check()

    def make(self, shard: int, on_done: OnDone, *, is_last_try: bool = True) -> int:
        if self._prepare_draft():
            return self._embeddings.make(shard, on_done, is_last_try=is_last_try)
        return num_listed(self._out / ERRORS, self._embeddings.keys(shard))

    def publish(self, on_done: OnDone) -> None:
        if self._prepare_draft():
            try:
                self._embeddings.publish(lambda *_: on_done(0, 0))
            except NoUsableImage:
                give_up(self._draft, self._owner)  # a retry cannot succeed
                raise
            self._publish_collection(on_done)
        discard(self._draft, self._owner)

    def _check_items(self) -> None:
        """Raises InvalidInput naming the first image that cannot be an item, before any work."""
        entries = self._source.entries
        checked_classes: set[str | None] = set()
        for key, class_name in zip(entries.keys(), entries.class_names(), strict=True):
            try:
                check_new_id(key)
                if class_name not in checked_classes:
                    checked_classes.add(class_name)
                    encode_metadata(key, metadata_of(class_name))
            except InvalidInput as error:
                raise InvalidInput(
                    f"{_shorten(key)} of {self._source.location} cannot be an item of a collection",
                    remedy=f"shorten its name or class, or leave it out ({error.message})",
                ) from error

    def _prepare_draft(self, *, claim_draft: bool = False) -> bool:
        """Claims the draft, or checks its owner; returns False if the collection is published.

        Raises Conflict if the output exists and is not this owner's collection, OutputGone if the
        draft is missing or another owner's.
        """
        if self._is_published():
            return False
        if claim_draft:
            claim(self._draft, self._owner)
        elif owner_of(self._draft) != self._owner and not self._is_published():
            raise OutputGone.of(self._draft)
        # published since the first check: delete the draft, as no other process will
        if self._is_published():
            discard(self._draft, self._owner)
            return False
        return True

    def _is_published(self) -> bool:
        """Returns whether the collection is published. Reads only its owner mark: a server may have
        the collection open, which excludes other processes.
        """
        if not os.path.lexists(self._out):
            return False
        if owner_of(self._out) != self._owner or not (self._out / LEDGER).is_file():
            raise Conflict(f"{self._out} exists", remedy="give another output directory")
        return True

    def _publish_collection(self, on_done: OnDone) -> None:
        """Makes a collection of all rows and publishes it with one rename."""
        # raises if another worker took over, before `Attempt` deletes that worker's attempt
        on_done(0, 0)
        with translate_os_errors(self._out), Attempt(self._draft) as attempt:
            try:
                collection_path = attempt.path / _COLLECTION
                self._build_collection(collection_path, on_done)
                on_done(0, 0)
                attempt.check()
                collection_path.rename(self._out)
                sync_path(self._out.parent)
            except OSError as error:
                raise_if_disk_full(error, self._out)
                is_taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
                # another process with the same owner may have published it
                if not (is_taken and self._is_published()):
                    raise

    def _build_collection(self, collection_path: Path, on_done: OnDone) -> None:
        embeddings = EmbeddingsArtifact.open(self._draft / EMBEDDINGS)
        stages = _CountedStages(on_done, images=sum(self.sizes), rows=embeddings.num_rows)
        source = images_parent(self._source, self._out / GENERATIONS / "0")
        index(embeddings, collection_path, stages, recall=None, source=source)
        self._add_thumbnails(embeddings, collection_path, on_done)
        shutil.copyfile(embeddings.artifact.file(ERRORS), collection_path / ERRORS)
        sync_path(collection_path / ERRORS)
        write_owner(collection_path, self._owner)

    def _add_thumbnails(
        self, embeddings: EmbeddingsArtifact, collection_path: Path, on_done: OnDone
    ) -> None:
        """Adds the thumbnails of all parts, until the limit of bytes is reached."""
        if not self._max_thumbnail_bytes:
            return
        folder = embeddings.artifact.path
        with Collection.open(
            collection_path, background=False, max_thumbnail_bytes=self._max_thumbnail_bytes
        ) as collection:
            for part in range(len(self.sizes)):
                for pictures in read_thumbnails(folder, part):
                    on_done(0, 0)
                    collection.add_thumbnails(pictures)
                    if not collection.takes_thumbnails:
                        return


def _shorten(key: str) -> str:
    """Returns a key, or both ends of a long key."""
    return key if len(key) <= 2 * _SHOWN_CHARS else f"{key[:_SHOWN_CHARS]}…{key[-_SHOWN_CHARS:]}"


@dataclass(frozen=True)
class _CountedStages:
    """The `Stages` protocol: maps progress on `rows` rows to progress on `images` images."""

    on_done: OnDone
    images: int
    rows: int

    @contextmanager
    def stage(self, name: str, total: int | None, *, done: int = 0) -> Iterator["_CountedMeter"]:
        del total
        # Skipped images count as done. The index stage counts all images a second time.
        num_done_before = self.images if name == INDEX_STAGE else 0
        yield _CountedMeter(self.on_done, num_done_before + self.images - self.rows + done)


@dataclass
class _CountedMeter:
    """The `Meter` protocol that reports to `on_done`."""

    on_done: OnDone
    done: int

    def advance(self, num: int = 1, **facts: object) -> None:
        del facts
        self.done += num
        self.on_done(self.done, 0)
