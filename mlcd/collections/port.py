"""The port of collections: the interface that the service uses for every kind of store.

CollectionPort    one collection
CollectionsPort   all collections of one place, by name

`Collection` and `Collections` store items in folders. tests/contract/collections runs the same
tests for every adapter; an adapter that promises less lists it in its `Promises`. Methods other
than properties may wait for a disk or a network.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.collections.changes import Outcome
from mlcd.collections.clusters import Clusters, Nearest
from mlcd.collections.item import Item
from mlcd.collections.plane import Plane
from mlcd.collections.searcher import SearchAnswer, Searcher
from mlcd.collections.thumbnail_store import Stored
from mlcd.images.thumbnail import Thumbnail
from mlcd.types import Embeddings, Fingerprint

DEFAULT_RECALL: Final = 0.99
StoreKind = Literal["folder", "postgresql", "milvus"]
# rows(): (ids, take(rows [n]) -> [n, D] float32)
Rows = tuple[list[str], Callable[[NDArray[np.int64]], Embeddings]]


@dataclass(frozen=True)
class Promises:
    """The promises of a store about its collections.

    writers: whether one or many processes may change a collection at the same time. consistency:
    which changes a search sees, in one sentence. cannot: limitations, a sentence each.
    """

    store: StoreKind
    writers: Literal["one", "many"]
    consistency: str
    cannot: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """The facts about a collection.

    items: number of items. indexed: number in the index. unindexed: number scanned in addition.
    kind, effort, recall: of the index that serves at present; its audited recall is None without an
    index. writable: False if the folder is not writable or was opened read-only. index_damaged:
    True from opening a damaged index until it is rebuilt; meanwhile every search is a scan.
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


class CollectionPort(Protocol):
    """One collection. All methods are thread-safe; `Collection` documents them."""

    @property
    def fingerprint(self) -> Fingerprint: ...
    @property
    def dimension(self) -> int: ...
    @property
    def recall_target(self) -> float: ...
    @property
    def promises(self) -> Promises: ...
    @property
    def takes_thumbnails(self) -> bool: ...
    @property
    def state(self) -> Searcher: ...
    def __len__(self) -> int: ...
    def close(self, *, finish: bool = True) -> None: ...
    def check_fingerprint(self, fingerprint: Fingerprint) -> None: ...
    def check_writable(self) -> None: ...
    def add(self, items: Sequence[Item]) -> list[Outcome]: ...
    def update_metadata(self, item_id: str, metadata: Mapping[str, Any]) -> Outcome: ...
    def delete(self, item_id: str) -> None: ...
    def delete_all(self, item_ids: Sequence[str]) -> list[Outcome]: ...
    def get(self, item_id: str) -> Item: ...
    def metadata_of(self, item_id: str) -> dict[str, Any] | None: ...
    def embedding_of(self, item_id: str) -> Embeddings: ...
    def search(
        self,
        queries: NDArray[np.floating],
        top: int,
        *,
        filter: object = None,  # noqa: A002 - the word of the field, as in the request
        threshold: float | None = None,
        exact: bool = False,
    ) -> SearchAnswer: ...
    def items(self, num_rows: int = ...) -> Iterator[list[Item]]: ...
    def rows(self) -> Rows: ...
    def describe(self) -> Description: ...
    def reindex(self, advance: Callable[[int], None] = ...) -> None: ...
    def clusters(self, digest: str, *, num_centers: int, nearest: Nearest) -> Clusters: ...
    def layout(self) -> Plane: ...
    def thumbnail(self, item_id: str) -> Thumbnail | None: ...
    def read_thumbnails(self, item_ids: Sequence[str]) -> dict[str, Thumbnail]: ...
    def thumbnail_versions(self, item_ids: Sequence[str]) -> list[str | None]: ...
    def add_thumbnails(self, thumbnails: Mapping[str, Thumbnail]) -> None: ...
    def without_thumbnail(self) -> list[str]: ...
    def describe_thumbnails(self) -> Stored | None: ...


class CollectionsPort(Protocol):
    """The collections of one place. All methods are thread-safe; `Collections` documents them.

    writable: whether collections can be created and deleted.
    """

    @property
    def writable(self) -> bool: ...

    def close(self, *, finish: bool = True) -> None: ...
    def find_new(self) -> None: ...
    def find_arrivals(self) -> list[str]: ...
    def has_arrived(self, name: str) -> bool: ...
    def open_arrived(self, name: str) -> None: ...
    def open_all_arrived(self) -> None: ...
    def unusable(self) -> Mapping[str, str]: ...
    def all(self) -> Mapping[str, CollectionPort]: ...
    def find(self, name: str) -> CollectionPort | None: ...
    def get(self, name: str) -> CollectionPort: ...
    def create(
        self, name: str, *, fingerprint: Fingerprint, dimension: int, recall: float | None = None
    ) -> tuple[CollectionPort, bool]: ...
    def delete(self, name: str) -> None: ...
