"""Collections and their items."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from mlcd.errors import ImageReason
from mlcd.wire.shapes import (
    EXAMPLE_IMAGE,
    Provenance,
    WholeNumber,
    WireAnswer,
    WireRequest,
    exactly_one,
)


class CreateRequest(WireRequest):
    """A request for a new collection.

    dimension: dimension of the served model, checked if given. recall: recall@10 that the index
    must reach, 0.99 by default.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"recall": 0.95}]})

    dimension: Annotated[WholeNumber, Field(ge=1)] | None = None
    recall: Annotated[float, Field(gt=0, le=0.995)] | None = None


class IndexRecall(WireAnswer):
    """The recall@10 of an index, measured on `queries` held-out items.

    low, high: its 95 % interval. rows: number of rows in the index when measured.
    """

    target: float
    measured: float
    low: float
    high: float
    queries: int
    rows: int


class DescribedIndex(WireAnswer):
    """The index of a collection.

    kind: flat means exact searches without an index, cagra a graph on a GPU. indexed, unindexed:
    numbers of items inside and outside of the index; items outside are scanned. effort: search
    effort of the index. target: recall@10 to reach. recall: null if searches are exact. damaged:
    the index was damaged and is being rebuilt; searches are exact until then. error: why the last
    attempt to build it failed.
    """

    kind: SkipValidation[Literal["flat", "hnsw", "ivf-sq8", "ivf-pq", "cagra"]]
    generation: int
    indexed: int
    unindexed: int
    effort: int | None
    target: float
    recall: IndexRecall | None
    damaged: bool
    error: str | None


class DescribedThumbnails(WireAnswer):
    """The thumbnails of a collection.

    items: number of items with a thumbnail. pictures: number of distinct thumbnails, each stored
    once. bytes: total size of the distinct thumbnails. max_bytes: limit on `bytes`. full: the last
    thumbnail was refused because of the limit.
    """

    items: int
    pictures: int
    bytes: int
    max_bytes: int
    full: bool


class DescribedStore(WireAnswer):
    """The store of a collection.

    kind: folder means a folder of this server. writers: whether one server or many may change the
    collection at the same time. consistency: which changes a search sees. cannot: what this store
    does not guarantee, one sentence each.
    """

    kind: SkipValidation[Literal["folder", "postgresql", "milvus"]]
    writers: SkipValidation[Literal["one", "many"]]
    consistency: str
    cannot: list[str]


class DescribedCollection(WireAnswer):
    """A collection.

    usable: whether its embeddings are of the served model. writable: false if the server may only
    read it. fields: metadata fields that filters can use. store: where the items are stored.
    """

    name: str
    items: int
    dimension: int
    fingerprint: str
    usable: bool
    writable: bool
    fields: list[str]
    index: DescribedIndex
    thumbnails: DescribedThumbnails | None = None
    store: DescribedStore | None = None


class UnusableCollection(WireAnswer):
    """An existing collection that cannot be opened. reason: why, and what to do about it."""

    name: str
    reason: str


class CollectionList(WireAnswer):
    """A page of the collections, ordered by name.

    next: cursor of the next page, null on the last. unusable: existing collections that cannot be
    opened; the same on every page.
    """

    collections: list[DescribedCollection]
    unusable: list[UnusableCollection] = Field(default_factory=list)
    next: str | None = None


class DeletedCollection(WireAnswer):
    """The answer after a collection was deleted."""

    collection: str
    outcome: SkipValidation[Literal["deleted"]]


class GivenItem(BaseModel):
    """An item to add.

    image: data-URI or URL of an image. embedding: embedding of the image, instead of the image.
    metadata: a JSON object; by default the item has none.
    """

    model_config = ConfigDict(
        extra="forbid", json_schema_extra=exactly_one(image="string", embedding="array")
    )

    id: Annotated[str, Field(min_length=1)]
    image: str | None = None
    embedding: list[float] | None = None
    metadata: dict[str, Any] | None = None


class AddRequest(BaseModel):
    """A request to add items, or replace items of the same id; each item may fail separately."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "items": [
                        {"id": "sea/1.png", "image": EXAMPLE_IMAGE, "metadata": {"album": "sea"}}
                    ]
                }
            ]
        },
    )

    items: Annotated[list[GivenItem | Any], Field(min_length=1)]


class AddedItem(WireAnswer):
    """An added item.

    outcome: unchanged if the bits of the embedding and the metadata were the same. thumbnail:
    version of its thumbnail, null without one.
    """

    index: int
    id: str
    outcome: SkipValidation[Literal["created", "updated", "unchanged"]]
    thumbnail: str | None = None


class RefusedItem(WireAnswer):
    """The error of one item that was not added.

    type: error of the image, or cannot-be-processed if another field cannot be used.
    """

    index: int
    type: SkipValidation[ImageReason | Literal["cannot-be-processed"]]
    title: str
    detail: str


class AddedItems(Provenance):
    """Outcomes of the added items and errors of the other items, by index in the request.

    thumbnails: facts about all thumbnails of the collection; null if it has none or is in a
    database.
    """

    collection: str
    thumbnails: DescribedThumbnails | None = None
    results: list[AddedItem]
    errors: list[RefusedItem]


class MetadataRequest(WireRequest):
    """A request that replaces all metadata of an item."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"metadata": {"album": "summer"}}]})

    metadata: dict[str, Any]


class DescribedItem(WireAnswer):
    """A stored item.

    embedding: a unit vector; null unless requested. thumbnail: version of its thumbnail, null
    without one.
    """

    collection: str
    id: str
    metadata: dict[str, Any]
    embedding: list[float] | None
    thumbnail: str | None = None


class ChangedItem(WireAnswer):
    """The outcome of a change to an item."""

    collection: str
    id: str
    outcome: SkipValidation[Literal["updated", "unchanged", "deleted"]]


class DeleteRequest(WireRequest):
    """A request to delete items."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": ["sea/1.png"]}]})

    ids: Annotated[list[str], Field(min_length=1, max_length=10_000)]


class DeletedItem(WireAnswer):
    """The outcome of one deletion; missing means that the item was not in the collection."""

    id: str
    outcome: SkipValidation[Literal["deleted", "missing"]]


class DeletedItems(WireAnswer):
    """The outcomes of a deletion, in the order of the request."""

    collection: str
    results: list[DeletedItem]
