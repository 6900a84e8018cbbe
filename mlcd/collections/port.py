"""The port of collections: all that the service asks of them, whatever keeps their items.

CollectionPort    one collection
CollectionsPort   all of one place, by name

Our own, `Collection` and `Collections`, keep items in folders. tests/contract/collections holds
every adapter to the same suite; where one promises less, its `Promises` say so. A method that is
not a property may wait for a disk or a network.
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

    writers: whether one process or many may change a collection at one time. consistency: which
    changes a search sees, in one sentence. cannot: what is not promised, a sentence each.
    """

    store: StoreKind
    writers: Literal["one", "many"]
    consistency: str
    cannot: tuple[str, ...] = ()


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


class CollectionPort(Protocol):
    """One collection. Every method may be called from many threads; see `Collection` for each."""

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
    """The collections of one place. Every method may be called from many threads; see
    `Collections` for each.

    writable: collections can be created and deleted.
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
