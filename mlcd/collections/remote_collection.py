"""The part of a remote collection that is the same for all stores."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from mlcd.collections.changes import Delete, Describe, Outcome, WriteRequest, missing, put
from mlcd.collections.clusters import Assigner, Clusters, Nearest
from mlcd.collections.item import Item, check_id, encode_metadata
from mlcd.collections.memory_state import ChangingItems, MemoryState
from mlcd.collections.plane import Placer, Plane
from mlcd.collections.port import Description, Promises, Rows
from mlcd.collections.search_checks import check_model
from mlcd.collections.searcher import SearchAnswer, Searcher
from mlcd.collections.thumbnail_store import Stored
from mlcd.collections.upkeep import Upkeep
from mlcd.images.thumbnail import Thumbnail
from mlcd.types import Embeddings, Fingerprint

COPIED_ROWS: Final = 8192


class RemoteCollection(ABC):
    """A collection in a remote store, which opens it. All methods are thread-safe; `Collection`
    documents them.
    """

    takes_thumbnails: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        fingerprint: Fingerprint,
        dimension: int,
        recall_target: float,
        promises: Promises,
        items: ChangingItems,
    ) -> None:
        self.name = name
        self.fingerprint: Fingerprint = fingerprint
        self.dimension, self.recall_target, self.promises = dimension, recall_target, promises
        self._upkeep, self._indexing = Upkeep(name, damaged=False), threading.Lock()
        self._memory = MemoryState(items, dimension)
        self._assigner, self._placer = Assigner(None), Placer(None)
        self._viewing = threading.Lock()

    def close(self, *, finish: bool = True) -> None:
        """Ends the upkeep; the store itself finishes an index that is being built."""
        if finish:
            self._upkeep.join()
        else:
            self._upkeep.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def __len__(self) -> int: ...

    def check_fingerprint(self, fingerprint: Fingerprint) -> None:
        check_model(self.name, self.fingerprint, fingerprint)

    def check_writable(self) -> None:  # noqa: B027 - the same for all stores
        """Does nothing: a write itself fails if the user may not write."""

    def add(self, items: Sequence[Item]) -> list[Outcome]:
        return self._submit(put(items, self.dimension))

    def update_metadata(self, item_id: str, metadata: Mapping[str, Any]) -> Outcome:
        return self._submit(Describe(check_id(item_id), encode_metadata(item_id, metadata)))[0]

    def delete(self, item_id: str) -> None:
        if self.delete_all([item_id]) == ["missing"]:
            raise missing(item_id)

    def delete_all(self, item_ids: Sequence[str]) -> list[Outcome]:
        return self._submit(Delete([check_id(item_id) for item_id in item_ids]))

    @abstractmethod
    def _submit(self, request: WriteRequest) -> list[Outcome]:
        """Makes the changes durable, and returns the outcome for each item."""

    @abstractmethod
    def get(self, item_id: str) -> Item: ...

    @abstractmethod
    def metadata_of(self, item_id: str) -> dict[str, Any] | None: ...

    def embedding_of(self, item_id: str) -> Embeddings:
        return self.get(item_id).embedding[None].astype(np.float32, copy=False)

    @abstractmethod
    def search(
        self,
        queries: NDArray[np.floating],
        top: int,
        *,
        filter: object = None,  # noqa: A002 - the word of the field, as in the request
        threshold: float | None = None,
        exact: bool = False,
    ) -> SearchAnswer: ...

    @abstractmethod
    def items(self, num_rows: int = COPIED_ROWS) -> Iterator[list[Item]]: ...

    @property
    def state(self) -> Searcher:
        """Returns the current state, read into memory."""
        return self._memory.now()

    def rows(self) -> Rows:
        return self.state.list_rows()

    def clusters(self, digest: str, *, num_centers: int, nearest: Nearest) -> Clusters:
        with self._viewing:
            return self._assigner.clusters(
                self.state, digest, num_centers=num_centers, nearest=nearest
            )

    def layout(self) -> Plane:
        with self._viewing:
            return self._placer.layout(self.state)

    def thumbnail(self, item_id: str) -> Thumbnail | None:
        if self.metadata_of(check_id(item_id)) is None:
            raise missing(item_id)
        return self.read_thumbnails([item_id]).get(item_id)

    @abstractmethod
    def read_thumbnails(self, item_ids: Sequence[str]) -> dict[str, Thumbnail]: ...

    @abstractmethod
    def thumbnail_versions(self, item_ids: Sequence[str]) -> list[str | None]: ...

    @abstractmethod
    def add_thumbnails(self, thumbnails: Mapping[str, Thumbnail]) -> None: ...

    @abstractmethod
    def without_thumbnail(self) -> list[str]: ...

    def describe_thumbnails(self) -> Stored | None:
        """Returns None: remote stores neither count nor bound thumbnails."""
        return None

    @abstractmethod
    def describe(self) -> Description: ...

    @abstractmethod
    def reindex(self, advance: Callable[[int], None] = lambda _: None) -> None: ...

    def _start_indexing(self, num_items: int) -> None:
        """Builds the index in the background, unless a build is running or failed recently."""
        if self._upkeep.may_try(num_items):
            with self._viewing:
                self._upkeep.start(self.reindex, lambda: num_items)

    def _describe_index(
        self,
        items: int,
        kind: str,
        effort: int | None,
        recall: dict[str, Any] | None,
        generation: int,
        fields: Sequence[str],
    ) -> Description:
        """Returns the description of the collection. An index, if there is one, has all items."""
        is_indexed = effort is not None
        return Description(
            items=items,
            dimension=self.dimension,
            fingerprint=self.fingerprint,
            recall_target=self.recall_target,
            kind=kind if is_indexed else "flat",
            indexed=items if is_indexed else 0,
            unindexed=0 if is_indexed else items,
            effort=effort,
            recall=recall,
            generation=generation,
            fields=sorted(fields),
            writable=True,
            index_damaged=False,
            indexing_error=self._upkeep.error,
        )


def choose_effort(
    effort: int | None, top: int, matching: int, items: int, *, most: int, scan_at_most: int
) -> int | None:
    """Returns the effort for a filtered search of an index; None if scanning the matching items is
    less work.

    The effort is scaled by items / matching: with fewer matches the nearest match is farther away,
    in proportion if the matches are distributed like all items. effort: effort for a search without
    a filter. most: greatest effort of the index. scan_at_most: number of matching items up to which
    a scan is used.
    """
    if effort is None or matching <= scan_at_most:
        return None
    scaled = int(np.ceil(max(effort, top) * items / matching))
    return None if scaled > most else scaled
