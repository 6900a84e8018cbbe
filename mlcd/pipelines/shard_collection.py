"""Shards of a collection: the shards of its embeddings, which are made first and do not stay.

OUT.partial/embeddings             as `mlcd embed` makes it, with the thumbnails of each shard
OUT.partial/attempt-…/collection   made of it; at the end it becomes OUT, and OUT.partial
                                   goes
OUT/errors.jsonl                   of the embeddings: the images that the collection lacks
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlcd.artifacts.disk import refuse_full_disk, sync_path, translate_os_errors
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

# A folder in the draft of the collection: beside the output only the draft takes a name.
EMBEDDINGS: Final = "embeddings"
_COLLECTION: Final = "collection"
_SHOWN: Final = 40


class CollectionShards:
    """The `Shards` protocol: embeddings, and a collection of them when all are made."""

    def __init__(
        self,
        embeddings: PartShards,
        source: Source,
        out: Path,
        owner: str,
        *,
        max_thumbnail_bytes: int,
    ) -> None:
        """embeddings: the parts at `EMBEDDINGS` in the draft of `out`. max_thumbnail_bytes: limit
        above which items lack thumbnails.
        """
        self._embeddings, self._source, self._out, self._owner = embeddings, source, out, owner
        self._draft, self._max_thumbnail_bytes = draft_path(out), max_thumbnail_bytes
        self.sizes, self.damaged_files = embeddings.sizes, embeddings.damaged_files

    def plan(self) -> None:
        self._check_items()
        if self._enter(begins=True):
            self._embeddings.plan()

    def check(self) -> None:
        if self._enter():
            self._embeddings.check()

    def make(self, shard: int, on_done: OnDone, *, is_last_try: bool = True) -> int:
        if self._enter():
            return self._embeddings.make(shard, on_done, is_last_try=is_last_try)
        return num_listed(self._out / ERRORS, self._embeddings.keys(shard))

    def publish(self, on_done: OnDone) -> None:
        if self._enter():
            try:
                self._embeddings.publish(lambda *_: on_done(0, 0))
            except NoUsableImage:
                give_up(self._draft, self._owner)  # nothing in it can be finished
                raise
            self._collect(on_done)
        discard(self._draft, self._owner)

    def _check_items(self) -> None:
        """Raises InvalidInput naming the first image that a collection could not hold: before there
        is any work.
        """
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
                    f"a collection cannot hold {_shorten(key)} of {self._source.location}",
                    remedy=f"shorten its name or class, or leave it out ({error.remedy})",
                ) from error

    def _enter(self, *, begins: bool = False) -> bool:
        """Tells whether work is left. Raises Conflict where something else is at the output, and
        OutputGone.
        """
        if self._is_published():
            return False
        if begins:
            claim(self._draft, self._owner)
        elif owner_of(self._draft) != self._owner and not self._is_published():
            raise OutputGone.of(self._draft)
        # published meanwhile: no other process comes back for what was claimed
        if self._is_published():
            discard(self._draft, self._owner)
            return False
        return True

    def _is_published(self) -> bool:
        """Tells whether the collection is published, by a mark: the server of a collection lets
        nobody else open it.
        """
        if not os.path.lexists(self._out):
            return False
        if owner_of(self._out) != self._owner or not (self._out / LEDGER).is_file():
            raise Conflict(f"{self._out} exists", remedy="give another output directory")
        return True

    def _collect(self, on_done: OnDone) -> None:
        """Makes a collection of all rows and puts it in its place, all of them or none."""
        on_done(
            0, 0
        )  # who lost the work meanwhile stops here, before the attempt of who has it goes
        with translate_os_errors(self._out), Attempt(self._draft) as attempt:
            try:
                building = attempt.path / _COLLECTION
                self._build(building, on_done)
                on_done(0, 0)
                attempt.check()
                building.rename(self._out)
                sync_path(self._out.parent)
            except OSError as error:
                refuse_full_disk(error, self._out)
                is_taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
                if not (is_taken and self._is_published()):  # by another process at the same work
                    raise

    def _build(self, building: Path, on_done: OnDone) -> None:
        embeddings = EmbeddingsArtifact.open(self._draft / EMBEDDINGS)
        stages = _CountedStages(on_done, images=sum(self.sizes), rows=embeddings.num_rows)
        source = images_parent(self._source, self._out / GENERATIONS / "0")
        index(embeddings, building, stages, recall=None, source=source)
        self._add_thumbnails(embeddings, building, on_done)
        shutil.copyfile(embeddings.artifact.file(ERRORS), building / ERRORS)
        sync_path(building / ERRORS)
        write_owner(building, self._owner)

    def _add_thumbnails(
        self, embeddings: EmbeddingsArtifact, building: Path, on_done: OnDone
    ) -> None:
        """Gives the items the thumbnails that were made, until the store is full."""
        if not self._max_thumbnail_bytes:
            return
        folder = embeddings.artifact.path
        with Collection.open(
            building, background=False, max_thumbnail_bytes=self._max_thumbnail_bytes
        ) as collection:
            for part in range(len(self.sizes)):
                for pictures in read_thumbnails(folder, part):
                    on_done(0, 0)
                    collection.add_thumbnails(pictures)
                    if not collection.takes_thumbnails:
                        return


def _shorten(key: str) -> str:
    """Returns a key, or both ends of a long one: they tell it from others."""
    return key if len(key) <= 2 * _SHOWN else f"{key[:_SHOWN]}…{key[-_SHOWN:]}"


@dataclass(frozen=True)
class _CountedStages:
    """The `Stages` of making a collection of `rows` rows, reported as those of `images` images."""

    on_done: OnDone
    images: int
    rows: int

    @contextmanager
    def stage(self, name: str, total: int | None, *, done: int = 0) -> Iterator["_Counted"]:
        del total
        before = self.images if name == INDEX_STAGE else 0
        yield _Counted(self.on_done, before + self.images - self.rows + done)


@dataclass
class _Counted:
    """The `Meter` protocol over `on_done`."""

    on_done: OnDone
    done: int

    def advance(self, num: int = 1, **facts: object) -> None:
        del facts
        self.done += num
        self.on_done(self.done, 0)
