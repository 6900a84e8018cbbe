"""A durable collection: every acknowledged item survives, and searches never wait for writers.

    items.sqlite       the ledger, source of truth
    index/00000001     the newest generation of the index over it
    thumbnails.sqlite  thumbnails of the items, created with the first thumbnail
    lock               lock of the process that has the collection open: see
                       `mlcd.collections.locks`

A background thread builds a new generation of the index once many items were added or deleted since
the last one.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.manifest import Parent
from mlcd.collections.changes import Delete, Describe, Outcome, WriteRequest, missing, put
from mlcd.collections.clusters import Clusters, Nearest
from mlcd.collections.filters import parse_filter
from mlcd.collections.folder import (
    GENERATIONS,
    LEDGER,
    OpenedFolder,
    make_folder,
    open_folder,
)
from mlcd.collections.generation import remove_before
from mlcd.collections.growth import build_growth
from mlcd.collections.item import Item, check_id, encode_metadata
from mlcd.collections.locks import LOCK
from mlcd.collections.open_ledgers import OpenLedgers
from mlcd.collections.plane import Plane
from mlcd.collections.port import DEFAULT_RECALL, Description, Promises, Rows
from mlcd.collections.search_checks import check_creation, check_model, check_queries
from mlcd.collections.searcher import SearchAnswer, Searcher
from mlcd.collections.stored_views import StoredViews
from mlcd.collections.thumbnail_store import DEFAULT_MAX_BYTES, THUMBNAILS, Stored, ThumbnailStore
from mlcd.collections.upkeep import Upkeep
from mlcd.collections.write_queue import WriteQueue
from mlcd.errors import Conflict
from mlcd.images.thumbnail import Thumbnail
from mlcd.too_many_files import explain_open_files
from mlcd.types import Embeddings, Fingerprint

_COPIED_ROWS: Final = 8192
PROMISES: Final = Promises(
    "folder", "one", "a search sees every change that was acknowledged before it began"
)


class Collection:
    """A collection in a folder. All methods are thread-safe."""

    def __init__(
        self, path: Path, folder: OpenedFolder, *, background: bool, ledgers: OpenLedgers | None
    ) -> None:
        self.path, self.writable, self._background = path, folder.writable, background
        self.fingerprint: Fingerprint = folder.facts["fingerprint"]
        self.dimension: int = folder.facts["dimension"]
        self.recall_target: float = folder.facts["recall"]
        self.source: dict[str, str] | None = folder.facts.get("source")
        self.promises = PROMISES
        self._ledger, self._thumbnails, self._lock = folder.ledger, folder.thumbnails, folder.lock
        self._ledgers = ledgers
        self._writes = WriteQueue(path.name, folder)
        self._views = StoredViews(path, self._writes, writable=self.writable)
        self._indexing = threading.Lock()
        self._upkeep = Upkeep(path.name, damaged=folder.damaged)

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        fingerprint: Fingerprint,
        dimension: int,
        recall: float = DEFAULT_RECALL,
        source: Mapping[str, str] | None = None,
        background: bool = True,
        ledgers: OpenLedgers | None = None,
        max_thumbnail_bytes: int = DEFAULT_MAX_BYTES,
    ) -> Self:
        """Creates an empty collection at `path`, atomically.

        recall: target for the lower bound of the index's audited recall. source: what the
        collection was made from. background, ledgers, max_thumbnail_bytes: see `open`. Raises
        Conflict if `path` exists.
        """
        check_creation(dimension, recall)
        facts = {
            "fingerprint": fingerprint,
            "dimension": dimension,
            "recall": recall,
            "source": dict(source or {}),
        }
        make_folder(path, facts)
        return cls.open(
            path, background=background, ledgers=ledgers, max_thumbnail_bytes=max_thumbnail_bytes
        )

    @classmethod
    @explain_open_files()
    def open(
        cls,
        path: Path,
        *,
        background: bool = True,
        read_only: bool = False,
        ledgers: OpenLedgers | None = None,
        max_thumbnail_bytes: int = DEFAULT_MAX_BYTES,
    ) -> Self:
        """Opens the collection at `path`, verifies its index and loads the items after it.

        background: rebuild the index in the background when many items have changed; False leaves
        it to `reindex`. read_only: open for searches only, which many processes may do at once;
        implied if the folder is not writable. ledgers: pool that bounds the store's open ledgers;
        None keeps this ledger open. max_thumbnail_bytes: total size above which no thumbnail is
        added.

        Raises ArtifactInvalid if the ledger is damaged, Conflict if another process has the
        collection open, and TooManyOpenFiles. A damaged index is not an error: searches scan all
        items until it is rebuilt.
        """
        writable = not read_only and all(
            os.access(existing, os.W_OK) or not existing.exists()
            for existing in (path, path / LEDGER, path / LOCK)
        )
        thumbnails = ThumbnailStore(
            path / THUMBNAILS,
            read_only=not writable,
            max_bytes=max_thumbnail_bytes,
            ledgers=ledgers,
        )
        folder = open_folder(path, thumbnails, writable=writable)
        collection = cls(path, folder, background=background, ledgers=ledgers)
        collection._record_use()
        collection._start_indexing_if_due()
        return collection

    def close(self, *, finish: bool = True) -> None:
        """Closes the collection.

        finish: wait for an index that is being built; False cancels it.
        """
        if not finish:
            self._upkeep.abandon()
        if not self._writes.close():
            return
        if finish:
            self._upkeep.join()
        with self._writes.lock:
            self._ledger.close_until_used()
            self._thumbnails.close()
            self._lock.release()
        if self._ledgers is not None:
            self._ledgers.forget(self)

    def close_until_used(self) -> bool:
        """Closes the ledger until the next change; searches do not need it. Returns False if a
        change is in progress.
        """
        if not self._writes.lock.acquire(blocking=False):
            return False
        try:
            self._ledger.close_until_used()
        finally:
            self._writes.lock.release()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.state.num_alive

    def check_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Raises ConfigInvalid if the collection has embeddings of another model."""
        check_model(self.path.name, self.fingerprint, fingerprint)

    def add(self, items: Sequence[Item]) -> list[Outcome]:
        """Adds all items or none, and returns `created`, `updated` or `unchanged` for each; durable
        when it returns.

        Raises InvalidInput naming the first invalid item, Unavailable if the disk is full.
        """
        return self._submit(put(items, self.dimension))

    def update_metadata(self, item_id: str, metadata: Mapping[str, Any]) -> Outcome:
        """Replaces the item's metadata; durable when it returns. Raises NotFound, InvalidInput."""
        return self._submit(Describe(check_id(item_id), encode_metadata(item_id, metadata)))[0]

    def delete(self, item_id: str) -> None:
        """Deletes an item; no search that starts later finds it, not even after a crash. Raises
        NotFound.
        """
        if self.delete_all([item_id]) == ["missing"]:
            raise missing(item_id)

    def delete_all(self, item_ids: Sequence[str]) -> list[Outcome]:
        """Deletes items in one transaction and returns `deleted` or `missing` for each."""
        return self._submit(Delete([check_id(item_id) for item_id in item_ids]))

    @property
    def state(self) -> Searcher:
        """Returns the current state, which is immutable; a change replaces it."""
        return self._writes.state

    def clusters(self, digest: str, *, num_centers: int, nearest: Nearest) -> Clusters:
        """Returns the members of each center among all items; compares only new items.

        digest: digest of the centers. nearest: see `Nearest`. The assignment is cached in the
        folder. Raises Conflict if the collection is closed meanwhile.
        """
        return self._views.clusters(digest, num_centers=num_centers, nearest=nearest)

    def layout(self) -> Plane:
        """Returns a point in the plane for each item; places only new items."""
        return self._views.layout()

    def thumbnail(self, item_id: str) -> Thumbnail | None:
        """Returns the item's thumbnail, or None if it has none. Raises NotFound."""
        searcher, position = self._position(item_id)
        return self._thumbnails.read(int(searcher.rows[position]))

    def read_thumbnails(self, item_ids: Sequence[str]) -> dict[str, Thumbnail]:
        """Returns the thumbnails of the items by id, without items that have none."""
        searcher, pictures = self.state, dict[str, Thumbnail]()
        for item_id in item_ids:
            position = searcher.find(item_id)
            picture = (
                None if position is None else self._thumbnails.read(int(searcher.rows[position]))
            )
            if picture is not None:
                pictures[item_id] = picture
        return pictures

    def thumbnail_versions(self, item_ids: Sequence[str]) -> list[str | None]:
        """Returns the version of each item's thumbnail, None for an item without one."""
        searcher = self.state
        positions = [searcher.find(item_id) for item_id in item_ids]
        present = [position for position in positions if position is not None]
        versions = iter(self._thumbnails.versions(searcher.rows[present].tolist()))
        return [None if position is None else next(versions) for position in positions]

    def add_thumbnails(self, thumbnails: Mapping[str, Thumbnail]) -> None:
        """Sets the thumbnails of existing items; ids of nonexistent items are ignored."""
        self.check_writable()
        with self._writes.exclusively():
            searcher = self.state
            self._thumbnails.change(
                removed_rows=[],
                added={
                    int(searcher.rows[position]): picture
                    for item_id, picture in thumbnails.items()
                    if (position := searcher.find(item_id)) is not None
                },
            )

    def without_thumbnail(self) -> list[str]:
        """Returns the ids of the items without a thumbnail."""
        searcher = self.state
        positions = np.flatnonzero(searcher.alive)
        lacks_thumbnail = ~np.isin(searcher.rows[positions], self._thumbnails.rows())
        return [searcher.ids[position] for position in positions[lacks_thumbnail].tolist()]

    def describe_thumbnails(self) -> Stored | None:
        """Returns the size of the thumbnail store, or None if it was never used."""
        return self._thumbnails.describe()

    @property
    def takes_thumbnails(self) -> bool:
        """Returns whether thumbnails can be added: writable, and the store is not full."""
        return self.writable and not self._thumbnails.is_full

    def get(self, item_id: str) -> Item:
        """Returns the stored item, with an embedding of norm 1. Raises NotFound."""
        searcher, position = self._position(item_id)
        return searcher.item(position)

    def metadata_of(self, item_id: str) -> dict[str, Any] | None:
        """Returns the item's metadata, or None for an unknown item."""
        searcher = self.state
        position = searcher.find(item_id)
        if position is None:
            return None
        metadata: dict[str, Any] = json.loads(searcher.metadata[position])
        return metadata

    def embedding_of(self, item_id: str) -> Embeddings:
        """Returns the item's embedding, [1, D] float32, of norm 1. Raises NotFound."""
        searcher, position = self._position(item_id)
        return searcher.vectors(np.array([position]))

    def search(
        self,
        queries: NDArray[np.floating],
        top: int,
        *,
        filter: object = None,  # noqa: A002 - the word of the field, as in the request
        threshold: float | None = None,
        exact: bool = False,
    ) -> SearchAnswer:
        """Returns the `top` items most similar to each query ([Q, D]), best first; fewer if fewer
        pass the filter and the threshold.

        filter: JSON, see `mlcd.collections.filters`. threshold: least similarity of a match. exact:
        scan all items instead of using the index. Raises InvalidInput naming the invalid argument.
        """
        unit = check_queries(queries, top, threshold, self.dimension)
        condition = None if filter is None else parse_filter(filter)
        return self.state.search(unit, top, condition=condition, threshold=threshold, exact=exact)

    def items(self, num_rows: int = _COPIED_ROWS) -> Iterator[list[Item]]:
        """Yields all items of the current state in blocks; later writes are not included."""
        yield from self.state.items(num_rows)

    def describe(self) -> Description:
        searcher = self.state
        tuned = searcher.generation.tuned
        kind: str = tuned.kind
        effort, recall = tuned.effort, tuned.recall
        if (choice := searcher.generation.gpu.graph_choice) is not None:
            kind, (effort, recall) = "cagra", choice
        return Description(
            items=searcher.num_alive,
            dimension=self.dimension,
            fingerprint=self.fingerprint,
            recall_target=self.recall_target,
            kind=kind,
            indexed=searcher.num_indexed,
            unindexed=len(searcher.delta),
            effort=effort,
            recall=asdict(recall) if recall else None,
            generation=searcher.generation.number,
            fields=searcher.columns.names(),
            writable=self.writable,
            index_damaged=self._upkeep.damaged,
            indexing_error=self._upkeep.error,
        )

    def reindex(self, advance: Callable[[int], None] = lambda _: None) -> None:
        """Builds, tunes and audits a new generation of the index over all items; reads and writes
        continue meanwhile.

        advance: called with the number of items processed since the last call, sometimes 0; raise
        in it to cancel and keep the present index.
        """
        self.check_writable()
        with self._indexing:
            self._build_generation(advance)

    def _reindex_if_due(self) -> None:
        with self._indexing:
            # Another thread may have built it while this thread waited for the lock.
            if self._upkeep.is_due(self.state):
                self._build_generation(lambda _: None)

    def _build_generation(self, advance: Callable[[int], None]) -> None:
        def check_and_advance(num: int) -> None:
            self._upkeep.check_wanted()
            advance(num)

        folder = self.path / GENERATIONS
        before = self.state
        growth = build_growth(
            folder,
            before,
            fingerprint=self.fingerprint,
            target=self.recall_target,
            parents=(Parent(**self.source),) if self.source else (),
            advance=check_and_advance,
        )
        self._writes.replace(before, growth)
        self._upkeep.record_success()
        remove_before(folder, before.generation.number + 1)

    def take_source(self, source: Mapping[str, str]) -> None:
        """Replaces the recorded source, which the next generation of the index records as its
        parent; durable when it returns.
        """
        self.check_writable()
        with self._writes.exclusively():
            self._ledger.set_fact("source", dict(source))
            self.source = dict(source)

    def rows(self) -> Rows:
        """Returns (ids, take) of the current state: take(indices [n]) returns the vectors of the
        ids at these indices, [n, D] float32.
        """
        return self.state.list_rows()

    def check_vectors(self) -> None:
        """Reads every item's vector from the ledger, also of indexed items. Raises ArtifactInvalid
        if one is damaged.
        """
        searcher = self.state
        rows = searcher.rows[: searcher.num_positions][searcher.alive]
        for start in range(0, len(rows), _COPIED_ROWS):
            with self._writes.exclusively():
                self._ledger.vectors(rows[start : start + _COPIED_ROWS], self.dimension)

    def check_thumbnails(self) -> None:
        """Reads every thumbnail. Raises ArtifactInvalid if one is damaged."""
        self._thumbnails.check()

    def _position(self, item_id: str) -> tuple[Searcher, int]:
        while True:
            searcher = self.state
            position = searcher.position_of.get(check_id(item_id))
            if position is None:
                raise missing(item_id)
            # If the position is beyond this state, a writer is about to replace the state; if it is
            # dead, a writer has replaced it. Both need the next state.
            if position < searcher.num_positions and searcher.alive[position]:
                return searcher, position

    def _submit(self, request: WriteRequest) -> list[Outcome]:
        self.check_writable()
        try:
            outcomes = self._writes.submit(request)
        finally:
            self._record_use()
        self._start_indexing_if_due()
        return outcomes

    def _record_use(self) -> None:
        if self._ledgers is not None:
            self._ledgers.record_use(self)

    def check_writable(self) -> None:
        """Raises Conflict if the collection is open for searches only."""
        if not self.writable:
            raise Conflict(
                f"the collection {self.path.name} is open for searches only",
                remedy="open it in a writable folder, by one process",
            )

    def _start_indexing_if_due(self) -> None:
        if not self._background or not self.writable or not self._upkeep.is_due(self.state):
            return
        with self._writes.lock:
            if not self._writes.closed:
                self._upkeep.start(self._reindex_if_due, lambda: self.state.num_positions)
