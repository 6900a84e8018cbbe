"""A durable collection: every acknowledged item survives, and searches never wait for writers.

    items.sqlite       the ledger, source of truth
    index/00000001     the newest generation of the index over it
    thumbnails.sqlite  pictures of the items, where there are any
    lock               held by the one process that has the collection open
                       (see `mlcd.collections.locks`)

Writers queue, and the first one writes for all that wait, in one transaction. The state that
readers hold is replaced after it is on the disk and before any writer is answered. A background
thread makes a new generation of the index when much was added or deleted since the last.
"""

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.disk import (
    lacks_open_files,
    limited_open_files,
    refuse_full_disk,
    replacing,
    too_many_files,
    translated_os_errors,
)
from mlcd.artifacts.manifest import Parent
from mlcd.collections.changes import (
    Change,
    Delete,
    Describe,
    Outcome,
    Put,
    WriteRequest,
    commit,
    missing,
)
from mlcd.collections.clusters import Assigner, Clusters, Nearest
from mlcd.collections.descriptors import Descriptors
from mlcd.collections.filters import parse_filter
from mlcd.collections.generation import open_newest, remove_before, write_generation
from mlcd.collections.growth import Growth
from mlcd.collections.item import Item, check_id, check_new_id, encode_metadata, unit_embedding
from mlcd.collections.ledger import Ledger
from mlcd.collections.locks import LOCK, Lock, lock_collection
from mlcd.collections.plane import Placer, Plane
from mlcd.collections.searcher import SearchAnswer, Searcher
from mlcd.collections.thumbnail_store import DEFAULT_MAX_BYTES, THUMBNAILS, Stored, ThumbnailStore
from mlcd.collections.upkeep import Upkeep
from mlcd.errors import ConfigInvalid, Conflict, InvalidInput, MlcdError
from mlcd.images.thumbnail import Thumbnail
from mlcd.indexes.tuning import LARGEST_TARGET
from mlcd.types import Embeddings, Fingerprint, Neighbors, unit_rows

LEDGER: Final = "items.sqlite"
GENERATIONS: Final = "index"
DEFAULT_RECALL: Final = 0.99
MAX_TOP: Final = 10_000
_COMMITTED_CHANGES: Final = 256
_COPIED_ROWS: Final = 8192
# rounding of a squared norm in float32, whatever the dimension
_UNIT_ROUNDING: Final = 1e-5
_log = logging.getLogger("mlcd.collections")


@dataclass(frozen=True)
class Description:
    """The facts about a collection.

    items: those alive. indexed: those of them in the index. unindexed: those scanned beside it.
    recall: that of the index, None where it is exact. writable: false where the folder can only be
    read, or was opened read-only. index_damaged: true where the index was damaged when the
    collection was opened and is being made again; until then every search is a scan.
    """

    items: int
    dimension: int
    fingerprint: Fingerprint
    recall_target: float
    kind: str
    indexed: int
    unindexed: int
    effort: int | None
    recall: dict[str, Any] | None
    generation: int
    fields: list[str]
    writable: bool
    index_damaged: bool
    indexing_error: str | None


class Collection:
    """A collection that `open` opens and `close` closes. Every method may be called from many
    threads.
    """

    def __init__(
        self,
        path: Path,
        ledger: Ledger,
        growth: Growth,
        facts: Mapping[str, Any],
        *,
        thumbnails: ThumbnailStore,
        lock: Lock,
        background: bool,
        writable: bool,
        damaged: bool,
        shared: Descriptors | None,
    ) -> None:
        self.path, self.writable, self._background = path, writable, background
        self.fingerprint: Fingerprint = facts["fingerprint"]
        self.dimension: int = facts["dimension"]
        self.recall_target: float = facts["recall"]
        self.source: dict[str, str] | None = facts.get("source")
        self._ledger, self._growth, self._lock, self._shared = ledger, growth, lock, shared
        self._searcher = growth.searcher()
        self._thumbnails = thumbnails
        self._assigner, self._placer = Assigner(path), Placer(path)
        self._viewing = threading.Lock()
        self._waiting: deque[Change] = deque()
        self._writing, self._indexing = threading.Lock(), threading.Lock()
        self._closed, self._broken = False, False
        self._upkeep = Upkeep(path.name, damaged=damaged)

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
        shared: Descriptors | None = None,
        max_thumbnail_bytes: int = DEFAULT_MAX_BYTES,
    ) -> Self:
        """Creates an empty collection at `path`, complete or not at all.

        recall: the recall that the index has to reach by the lower bound of its interval. source:
        what the collection was made from. background, shared, max_thumbnail_bytes: see `open`.
        Raises Conflict where something exists at `path`.
        """
        if not 0 < recall <= LARGEST_TARGET:
            raise ConfigInvalid(
                f"a recall of {recall:g} cannot be shown",
                remedy=f"give one in (0, {LARGEST_TARGET:g}], or search exact",
            )
        if dimension < 1:
            raise ConfigInvalid(f"{dimension} is no dimension")
        if path.exists():
            raise Conflict(f"{path} exists", remedy="give another name, or delete it first")
        if lacks_open_files():  # before anything exists that could not be removed either
            raise too_many_files()
        facts = {
            "fingerprint": fingerprint,
            "dimension": dimension,
            "recall": recall,
            "source": dict(source or {}),
        }
        with translated_os_errors(path):
            try:
                _write_empty(path, facts)
            except (OSError, MlcdError) as error:
                refuse_full_disk(error, path)
                raise
        return cls.open(
            path, background=background, shared=shared, max_thumbnail_bytes=max_thumbnail_bytes
        )

    @classmethod
    @limited_open_files()
    def open(
        cls,
        path: Path,
        *,
        background: bool = True,
        read_only: bool = False,
        shared: Descriptors | None = None,
        max_thumbnail_bytes: int = DEFAULT_MAX_BYTES,
    ) -> Self:
        """Opens the collection at `path`, verifies its index and adds to it what it lacks.

        background: the index is made again when much has changed; otherwise only by `reindex`.
        read_only: for searches alone, by any number of processes at a time; this also holds where
        the folder cannot be written. shared: the descriptors of the store that opens it; without,
        the collection keeps its own. max_thumbnail_bytes: above this, items get no thumbnails.

        Raises ArtifactInvalid where the ledger is damaged, Conflict where another process has it
        open, TooManyOpenFiles. A damaged index is no error: everything is scanned until it is made
        again.
        """
        writable = not read_only and all(
            os.access(each, os.W_OK) for each in (path, path / LEDGER, path / LOCK)
        )
        lock = (shared.lock if shared else lock_collection)(path, writable=writable)
        ledger: Ledger | None = None
        thumbnails = ThumbnailStore(
            path / THUMBNAILS,
            read_only=not writable,
            max_bytes=max_thumbnail_bytes,
            shared=shared,
        )
        try:
            ledger = Ledger.open(path / LEDGER, read_only=not writable)
            facts = ledger.facts()
            dimension, folder = facts["dimension"], path / GENERATIONS
            generation, damaged = open_newest(
                folder, dimension=dimension, fingerprint=facts["fingerprint"]
            )
            growth = Growth(generation, dimension)
            _replay(ledger, growth, generation.rows, dimension)
            thumbnails.open(growth.rows())
            collection = cls(
                path,
                ledger,
                growth,
                facts,
                thumbnails=thumbnails,
                lock=lock,
                background=background,
                writable=writable,
                damaged=damaged,
                shared=shared,
            )
        except BaseException:
            if ledger is not None:
                ledger.rest()
            thumbnails.close()
            lock.release()
            raise
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
        with self._writing:
            if self._closed:
                return
            self._closed = True
        if finish:
            self._upkeep.join()
        with self._writing:
            self._ledger.rest()
            self._thumbnails.close()
            self._lock.release()
        if self._shared is not None:
            self._shared.forget(self)

    def rest(self) -> bool:
        """Closes the ledger until the next change, unless a change is in progress; searches do not
        need it.
        """
        if not self._writing.acquire(blocking=False):
            return False
        try:
            self._ledger.rest()
        finally:
            self._writing.release()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self._searcher.num_alive

    def check_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Raises ConfigInvalid where embeddings of this model do not belong in the collection."""
        if fingerprint != self.fingerprint:
            raise ConfigInvalid(
                f"{self.path.name} holds embeddings of another model "
                f"({self.fingerprint[:12]}, given {fingerprint[:12]})",
                remedy="embed the images with the collection's model, or make another collection",
            )

    def add(self, items: Sequence[Item]) -> list[Outcome]:
        """Adds all items or none, and returns `created`, `updated` or `unchanged` for each; durable
        when it returns.

        Raises InvalidInput naming the first item that cannot be held, Unavailable where there is no
        space.
        """
        encoded = []
        thumbnails = {item.id: item.thumbnail for item in items if item.thumbnail is not None}
        seen: set[str] = set()
        for item in items:
            item_id = check_new_id(item.id)
            if item_id in seen:
                raise InvalidInput(
                    f"the id {item_id[:80]!r} is given twice", remedy="give every id once"
                )
            seen.add(item_id)
            vector = unit_embedding(item_id, item.embedding, self.dimension)
            encoded.append((item_id, vector, encode_metadata(item_id, item.metadata)))
        return self._submit(Put(encoded, thumbnails))

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
        return self._searcher

    def clusters(self, digest: str, *, num_centers: int, nearest: Nearest) -> Clusters:
        """Returns the members of each center among all items; only new ones are compared.

        digest: that of the centers. nearest: see `Nearest`. What was computed is kept beside the
        collection. Raises Conflict where the collection is closed meanwhile.
        """

        def go_on(vectors: Embeddings) -> Neighbors:
            self._check_open()
            return nearest(vectors)

        with self._viewing:
            found = self._assigner.clusters(
                self._searcher, digest, num_centers=num_centers, nearest=go_on
            )
            if self.writable and self._assigner.is_worth_writing:
                self._keep(self._assigner.write)
        return found

    def layout(self) -> Plane:
        """Returns a point in the plane for each item; only new ones are placed."""
        with self._viewing:
            return self._placer.layout(self._searcher)

    def _keep(self, write: Callable[[], None]) -> None:
        """Writes what can be computed again; where that fails, it is computed again."""
        try:
            with self._writing:  # a collection that is deleted is closed under this lock
                self._check_open()
                write()
        except (OSError, Conflict) as error:
            _log.warning("the clusters of %s could not be kept: %s", self.path.name, error)

    def thumbnail(self, item_id: str) -> Thumbnail | None:
        """Returns the item's thumbnail, or None where it has none. Raises NotFound."""
        searcher, position = self._position(item_id)
        return self._thumbnails.read(int(searcher.rows[position]))

    def thumbnail_versions(self, item_ids: Sequence[str]) -> list[str | None]:
        """Returns the version of each item's thumbnail, or None where it has none."""
        searcher = self._searcher
        positions = [searcher.find(item_id) for item_id in item_ids]
        found = [position for position in positions if position is not None]
        versions = iter(self._thumbnails.versions(searcher.rows[found].tolist()))
        return [None if position is None else next(versions) for position in positions]

    def add_thumbnails(self, thumbnails: Mapping[str, Thumbnail]) -> None:
        """Gives items that exist a picture, in place of an earlier one."""
        self.check_writable()
        with self._writing:
            self._check_open()
            searcher = self._searcher
            self._thumbnails.change(
                gone=[],
                added={
                    int(searcher.rows[position]): picture
                    for item_id, picture in thumbnails.items()
                    if (position := searcher.find(item_id)) is not None
                },
            )

    def without_thumbnail(self) -> list[str]:
        """Returns the ids of the items that have no thumbnail."""
        searcher = self._searcher
        positions = np.flatnonzero(searcher.alive)
        lacking = ~np.isin(searcher.rows[positions], self._thumbnails.rows())
        return [searcher.ids[position] for position in positions[lacking].tolist()]

    def described_thumbnails(self) -> Stored | None:
        """Returns the size of the thumbnails, or None where there never were any."""
        return self._thumbnails.describe()

    @property
    def takes_thumbnails(self) -> bool:
        """Tells whether an item that is added now would keep a thumbnail."""
        return self.writable and not self._thumbnails.is_full

    def get(self, item_id: str) -> Item:
        """Returns the item as it is kept, with an embedding of norm 1. Raises NotFound."""
        searcher, position = self._position(item_id)
        vector = searcher.vectors(np.array([position]))[0]
        return Item(item_id, vector, json.loads(searcher.metadata[position]))

    def metadata_of(self, item_id: str) -> dict[str, Any] | None:
        """Returns the item's metadata, or None where there is no such item."""
        searcher = self._searcher
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
        if not isinstance(top, int) or not 1 <= top <= MAX_TOP:
            raise InvalidInput(f"top is not in 1 to {MAX_TOP}")
        if threshold is not None and not -1 <= threshold <= 1:
            raise InvalidInput("the threshold is no cosine", remedy="give one in [-1, 1]")
        if queries.ndim != 2 or queries.shape[1] != self.dimension:
            raise InvalidInput(
                f"the collection has dimension {self.dimension}, got {list(queries.shape)}"
            )
        condition = None if filter is None else parse_filter(filter)
        return self._searcher.search(
            _unit(queries), top, condition=condition, threshold=threshold, exact=exact
        )

    def items(self, num_rows: int = _COPIED_ROWS) -> Iterator[list[Item]]:
        """Yields all items of one moment, in blocks, without what is written meanwhile."""
        searcher = self._searcher
        positions = np.flatnonzero(searcher.alive)
        for start in range(0, len(positions), num_rows):
            block = positions[start : start + num_rows]
            yield [
                Item(searcher.ids[position], vector, json.loads(searcher.metadata[position]))
                for position, vector in zip(block.tolist(), searcher.vectors(block), strict=True)
            ]

    def describe(self) -> Description:
        searcher = self._searcher
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

        def go_on(num: int) -> None:
            self._upkeep.check_wanted()
            advance(num)

        with self._indexing:
            before = self._searcher
            alive = np.flatnonzero(before.alive)
            order = alive[np.random.default_rng(before.generation.number).permutation(len(alive))]
            folder = self.path / GENERATIONS
            generation = write_generation(
                folder,
                before.generation.number + 1,
                rows=before.rows[order],
                blocks=(
                    before.vectors(order[i : i + _COPIED_ROWS])
                    for i in range(0, len(order), _COPIED_ROWS)
                ),
                dimension=self.dimension,
                fingerprint=self.fingerprint,
                target=self.recall_target,
                parents=self._parents(),
                advance=go_on,
            )
            growth = Growth(generation, self.dimension)
            growth.take_over(before, order)
            with self._writing:
                growth.catch_up(before, self._searcher)
                self._growth, self._searcher = growth, growth.searcher()
            self._upkeep.done()
            remove_before(folder, generation.number)

    def take_source(self, source: Mapping[str, str]) -> None:
        """Changes the recorded source, which the next generation of the index states; durable when
        it returns.
        """
        self.check_writable()
        with self._writing:
            self._check_open()
            self._ledger.state("source", dict(source))
            self.source = dict(source)

    def rows(self) -> tuple[list[str], Callable[[int, int], Embeddings]]:
        """Returns (ids, read) of one moment: read(start, stop) returns these items' vectors, [stop
        - start, D] float32.
        """
        searcher = self._searcher
        positions = np.flatnonzero(searcher.alive)
        ids = [searcher.ids[position] for position in positions.tolist()]
        return ids, lambda start, stop: searcher.vectors(positions[start:stop])

    def check_vectors(self) -> None:
        """Reads every item's vector from the ledger, not only those that no index has yet. Raises
        ArtifactInvalid.
        """
        searcher = self._searcher
        rows = searcher.rows[: searcher.num_positions][searcher.alive]
        for start in range(0, len(rows), _COPIED_ROWS):
            with self._writing:
                self._check_open()
                self._ledger.vectors(rows[start : start + _COPIED_ROWS], self.dimension)

    def check_thumbnails(self) -> None:
        """Reads every thumbnail. Raises ArtifactInvalid where one is damaged."""
        self._thumbnails.check()

    def _parents(self) -> tuple[Parent, ...]:
        return (Parent(**self.source),) if self.source else ()

    def _position(self, item_id: str) -> tuple[Searcher, int]:
        while True:
            searcher = self._searcher
            position = searcher.position_of.get(check_id(item_id))
            if position is None:
                raise missing(item_id)
            # A position beyond this state: a writer is about to replace the state. A dead one: the
            # writer has replaced it.
            if position < searcher.num_positions and searcher.alive[position]:
                return searcher, position

    def _submit(self, request: WriteRequest) -> list[Outcome]:
        self.check_writable()
        change = Change(request)
        self._waiting.append(change)
        with self._writing:
            while not change.settled:
                self._write_for_all()
        self._was_used()
        if change.error is not None:
            raise change.error
        self._index_where_due()
        return change.outcomes

    def _was_used(self) -> None:
        if self._shared is not None:
            self._shared.used(self)

    def _write_for_all(self) -> None:
        changes = [
            self._waiting.popleft() for _ in range(min(len(self._waiting), _COMMITTED_CHANGES))
        ]
        try:
            self._check_open()
            commit(self._ledger, changes, self.dimension)
            gone: list[int] = []
            pictures: dict[int, Thumbnail] = {}
            for change in changes:
                gone += self._growth.apply(change.effects)
                if change.error is None:
                    shown = change.request.thumbnails.items()
                    pictures |= {self._growth.row_of(item_id): one for item_id, one in shown}
            self._thumbnails.change(
                gone=gone,
                added={row: pictures[row] for row in pictures.keys() - set(gone)},
            )
            self._searcher = self._growth.searcher()
        except BaseException as error:
            # The disk may hold what memory does not: nothing may be written on top of that.
            self._broken = self._broken or not isinstance(error, Conflict)
            for change in changes:
                change.error = error
            raise
        finally:
            for change in changes:
                change.settled = True

    def _check_open(self) -> None:
        if self._closed:
            raise Conflict(
                f"the collection {self.path.name} was closed or deleted meanwhile",
                remedy="open it again",
            )
        if self._broken:
            raise Conflict(
                f"the collection {self.path.name} cannot be changed after a failure",
                remedy="open it again",
            )

    def check_writable(self) -> None:
        """Raises Conflict where the collection is open for searches only."""
        if not self.writable:
            raise Conflict(
                f"the collection {self.path.name} is open for searches only",
                remedy="open it in a folder that can be written, by one process",
            )

    def _index_where_due(self) -> None:
        if not self._background or not self.writable or not self._upkeep.is_due(self._searcher):
            return
        with self._writing:
            if not self._closed:
                self._upkeep.begin(self.reindex, lambda: self._searcher.num_positions)


def _write_empty(path: Path, facts: Mapping[str, Any]) -> None:
    with replacing(path) as draft:
        draft.mkdir(parents=True)
        Ledger.create(draft / LEDGER, facts).rest()
        (draft / GENERATIONS).mkdir()
        (draft / LOCK).touch()


def _unit(queries: NDArray[np.floating]) -> Embeddings:
    """Returns unit rows; rows that are of unit length already, as our encoders give them, stay as
    they are.
    """
    if (
        queries.dtype == np.float32
        and (np.abs(np.einsum("qd,qd->q", queries, queries) - 1) <= _UNIT_ROUNDING).all()
    ):
        return np.ascontiguousarray(queries)
    return unit_rows(queries)


def _replay(ledger: Ledger, growth: Growth, rows: NDArray[np.int64], dimension: int) -> None:
    """Takes in the ledger's items: those in the index at their positions, the others
    behind them.
    """
    position_of = {row: position for position, row in enumerate(rows.tolist())}
    waiting = []
    for item in ledger.items():
        position = position_of.get(item.row)
        if position is not None:
            growth.revive(position, item)
        else:
            waiting.append(item)
    for start in range(0, len(waiting), _COPIED_ROWS):
        part = waiting[start : start + _COPIED_ROWS]
        for item, vector in zip(
            part, ledger.vectors([item.row for item in part], dimension), strict=True
        ):
            growth.append(item.id, item.row, vector, item.metadata)
