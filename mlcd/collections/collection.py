"""A durable collection: every acknowledged item survives, and searches never wait for writers.

    items.sqlite       the ledger, source of truth
    index/00000001     the newest generation of the index over it
    thumbnails.sqlite  pictures of the items, where there are any
    lock               held by the one process that has the collection open
                       (see `mlcd.collections.locks`)

A background thread makes a new generation of the index when much was added or deleted since the
last.
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
from mlcd.collections.growth import regrown
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
    """A collection that `open` opens and `close` closes. Every method may be called from many
    threads.
    """

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
        """Creates an empty collection at `path`, complete or not at all.

        recall: the recall that the index has to reach by the lower bound of its interval. source:
        what the collection was made from. background, ledgers, max_thumbnail_bytes: see `open`.
        Raises Conflict where something exists at `path`.
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
        """Opens the collection at `path`, verifies its index and adds to it what it lacks.

        background: the index is made again when much has changed; otherwise only by `reindex`.
        read_only: for searches alone, by any number of processes at a time; this also holds where
        the folder cannot be written. ledgers: those that its store keeps open; None where its own
        stays open. max_thumbnail_bytes: above this, items get no thumbnails.

        Raises ArtifactInvalid where the ledger is damaged, Conflict where another process has it
        open, TooManyOpenFiles. A damaged index is not an error: everything is scanned until it is
        made again.
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
        collection._was_used()
        collection._index_where_due()
        return collection

    def close(self, *, finish: bool = True) -> None:
        """Closes the collection.

        finish: first completes the index that is being made; otherwise it is given up, and made
        when it is due again.
        """
        if not finish:
            self._upkeep.abandon()
        if not self._writes.close():
            return
        if finish:
            self._upkeep.join()
        with self._writes.lock:
            self._ledger.rest()
            self._thumbnails.close()
            self._lock.release()
        if self._ledgers is not None:
            self._ledgers.forget(self)

    def rest(self) -> bool:
        """Closes the ledger until the next change, unless a change is in progress; searches do not
        need it.
        """
        if not self._writes.lock.acquire(blocking=False):
            return False
        try:
            self._ledger.rest()
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
        """Raises ConfigInvalid where embeddings of this model do not belong in the collection."""
        check_model(self.path.name, self.fingerprint, fingerprint)

    def add(self, items: Sequence[Item]) -> list[Outcome]:
        """Adds all items or none, and returns `created`, `updated` or `unchanged` for each; durable
        when it returns.

        Raises InvalidInput naming the first item that cannot be held, Unavailable where there is no
        space.
        """
        return self._submit(put(items, self.dimension))

    def update_metadata(self, item_id: str, metadata: Mapping[str, Any]) -> Outcome:
        """Replaces the item's metadata; durable when it returns. Raises NotFound, InvalidInput."""
        return self._submit(Describe(check_id(item_id), encode_metadata(item_id, metadata)))[0]

    def delete(self, item_id: str) -> None:
        """Deletes an item; no search that begins later finds it, not even after a crash. Raises
        NotFound.
        """
        if self.delete_all([item_id]) == ["missing"]:
            raise missing(item_id)

    def delete_all(self, item_ids: Sequence[str]) -> list[Outcome]:
        """Deletes items in one transaction and returns `deleted` or `missing` for each."""
        return self._submit(Delete([check_id(item_id) for item_id in item_ids]))

    @property
    def state(self) -> Searcher:
        """Returns the present state, which never changes; another one replaces it."""
        return self._writes.state

    def clusters(self, digest: str, *, num_centers: int, nearest: Nearest) -> Clusters:
        """Returns the members of each center among all items; only new ones are compared.

        digest: that of the centers. nearest: see `Nearest`. What was computed is kept beside the
        collection. Raises Conflict where the collection is closed meanwhile.
        """
        return self._views.clusters(digest, num_centers=num_centers, nearest=nearest)

    def layout(self) -> Plane:
        """Returns a point in the plane for each item; only new ones are placed."""
        return self._views.layout()

    def thumbnail(self, item_id: str) -> Thumbnail | None:
        """Returns the item's thumbnail, or None where it has none. Raises NotFound."""
        searcher, position = self._position(item_id)
        return self._thumbnails.read(int(searcher.rows[position]))

    def read_thumbnails(self, item_ids: Sequence[str]) -> dict[str, Thumbnail]:
        """Returns the thumbnails of those of the items that have one, by id."""
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
        """Returns the version of each item's thumbnail, or None where it has none."""
        searcher = self.state
        positions = [searcher.find(item_id) for item_id in item_ids]
        present = [position for position in positions if position is not None]
        versions = iter(self._thumbnails.versions(searcher.rows[present].tolist()))
        return [None if position is None else next(versions) for position in positions]

    def add_thumbnails(self, thumbnails: Mapping[str, Thumbnail]) -> None:
        """Gives items that exist a picture, in place of an earlier one."""
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
        lacking = ~np.isin(searcher.rows[positions], self._thumbnails.rows())
        return [searcher.ids[position] for position in positions[lacking].tolist()]

    def describe_thumbnails(self) -> Stored | None:
        """Returns the size of the thumbnails, or None where there never were any."""
        return self._thumbnails.describe()

    @property
    def takes_thumbnails(self) -> bool:
        """Tells whether an item that is added now would keep a thumbnail."""
        return self.writable and not self._thumbnails.is_full

    def get(self, item_id: str) -> Item:
        """Returns the item as it is kept, with an embedding of norm 1. Raises NotFound."""
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
        """Returns the items most similar to each query ([Q, D]), best first: min(top, items that
        the filter leaves).

        filter: JSON, see `mlcd.collections.filters`. threshold: the least similarity of a match.
        exact: compares everything, whatever the index. Raises InvalidInput naming what is wrong
        with the request.
        """
        unit = check_queries(queries, top, threshold, self.dimension)
        condition = None if filter is None else parse_filter(filter)
        return self.state.search(unit, top, condition=condition, threshold=threshold, exact=exact)

    def items(self, num_rows: int = _COPIED_ROWS) -> Iterator[list[Item]]:
        """Yields all items of one moment, in blocks, without what is written meanwhile."""
        yield from self.state.items(num_rows)

    def describe(self) -> Description:
        searcher = self.state
        tuned = searcher.generation.tuned
        return Description(
            items=searcher.num_alive,
            dimension=self.dimension,
            fingerprint=self.fingerprint,
            recall_target=self.recall_target,
            kind=tuned.kind,
            indexed=searcher.num_indexed,
            unindexed=len(searcher.delta),
            effort=tuned.effort,
            recall=asdict(tuned.recall) if tuned.recall else None,
            generation=searcher.generation.number,
            fields=searcher.columns.names(),
            writable=self.writable,
            index_damaged=self._upkeep.damaged,
            indexing_error=self._upkeep.error,
        )

    def reindex(self, advance: Callable[[int], None] = lambda _: None) -> None:
        """Makes a new generation of the index over everything, tuned and audited anew; reads and
        writes go on meanwhile.

        advance: is called with the number of further items done, now and then 0; what it raises
        ends the work, and the index stays as it was.
        """
        self.check_writable()
        with self._indexing:
            self._regrow(advance)

    def _reindex_where_due(self) -> None:
        with self._indexing:
            # another thread may have made it while this one waited
            if self._upkeep.is_due(self.state):
                self._regrow(lambda _: None)

    def _regrow(self, advance: Callable[[int], None]) -> None:
        def go_on(num: int) -> None:
            self._upkeep.check_wanted()
            advance(num)

        folder = self.path / GENERATIONS
        before = self.state
        growth = regrown(
            folder,
            before,
            fingerprint=self.fingerprint,
            target=self.recall_target,
            parents=(Parent(**self.source),) if self.source else (),
            advance=go_on,
        )
        self._writes.replace(before, growth)
        self._upkeep.record_success()
        remove_before(folder, before.generation.number + 1)

    def take_source(self, source: Mapping[str, str]) -> None:
        """Changes the recorded source, which the next generation of the index states; durable when
        it returns.
        """
        self.check_writable()
        with self._writes.exclusively():
            self._ledger.state("source", dict(source))
            self.source = dict(source)

    def rows(self) -> Rows:
        """Returns (ids, take) of one moment: take(rows [n]) returns these items' vectors, [n, D]
        float32.
        """
        return self.state.list_rows()

    def check_vectors(self) -> None:
        """Reads every item's vector from the ledger, not only those that no index has yet. Raises
        ArtifactInvalid.
        """
        searcher = self.state
        rows = searcher.rows[: searcher.num_positions][searcher.alive]
        for start in range(0, len(rows), _COPIED_ROWS):
            with self._writes.exclusively():
                self._ledger.vectors(rows[start : start + _COPIED_ROWS], self.dimension)

    def check_thumbnails(self) -> None:
        """Reads every thumbnail. Raises ArtifactInvalid where one is damaged."""
        self._thumbnails.check()

    def _position(self, item_id: str) -> tuple[Searcher, int]:
        while True:
            searcher = self.state
            position = searcher.position_of.get(check_id(item_id))
            if position is None:
                raise missing(item_id)
            # A position beyond this state: a writer is about to replace the state. A dead one: the
            # writer has replaced it.
            if position < searcher.num_positions and searcher.alive[position]:
                return searcher, position

    def _submit(self, request: WriteRequest) -> list[Outcome]:
        self.check_writable()
        try:
            outcomes = self._writes.submit(request)
        finally:
            self._was_used()
        self._index_where_due()
        return outcomes

    def _was_used(self) -> None:
        if self._ledgers is not None:
            self._ledgers.record_use(self)

    def check_writable(self) -> None:
        """Raises Conflict where the collection is open for searches only."""
        if not self.writable:
            raise Conflict(
                f"the collection {self.path.name} is open for searches only",
                remedy="open it in a folder that can be written, by one process",
            )

    def _index_where_due(self) -> None:
        if not self._background or not self.writable or not self._upkeep.is_due(self.state):
            return
        with self._writes.lock:
            if not self._writes.closed:
                self._upkeep.begin(self._reindex_where_due, lambda: self.state.num_positions)
