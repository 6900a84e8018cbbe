"""The collections and their items."""

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

    dimension: that of the served model, or nothing. recall: the recall@10 that the index must
    reach; 0.99 by default.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"recall": 0.95}]})

    dimension: Annotated[WholeNumber, Field(ge=1)] | None = None
    recall: Annotated[float, Field(gt=0, le=0.995)] | None = None


class IndexRecall(WireAnswer):
    """The recall@10 of an index on `queries` held-out items, with its 95 % interval.

    rows: how many the index held then.
    """

    target: float
    measured: float
    low: float
    high: float
    queries: int
    rows: int


class DescribedIndex(WireAnswer):
    """The index of a collection.

    kind: flat means exact searches without an index. indexed, unindexed: numbers of items; items
    outside the index are scanned beside it. effort: how far a search looks.
    recall: null where searches are exact. damaged: the index was damaged and is made again;
    searches are exact until then. error: why the last attempt to make it failed.
    """

    kind: SkipValidation[Literal["flat", "hnsw", "ivf-sq8", "ivf-pq"]]
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

    items: those that have one. pictures: the different ones, which are kept once each. bytes: those
    of all pictures. max_bytes: above this none is added. full: the last one was refused for that.
    """

    items: int
    pictures: int
    bytes: int
    max_bytes: int
    full: bool


class DescribedStore(WireAnswer):
    """The store of a collection.

    kind: folder is the server's own. writers: whether one server or many may change the collection
    at one time. consistency: which changes a search sees. cannot: what this store does not promise,
    a sentence each.
    """

    kind: SkipValidation[Literal["folder", "postgresql", "milvus"]]
    writers: SkipValidation[Literal["one", "many"]]
    consistency: str
    cannot: list[str]


class DescribedCollection(WireAnswer):
    """A collection.

    usable: it holds embeddings of the served model. writable: false where the server may only read
    it. fields: those that filters can name. store: what keeps the items.
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
    """A collection that is there and cannot be opened. reason: why, and what to do about it."""

    name: str
    reason: str


class CollectionList(WireAnswer):
    """A page of all collections, by name. next: the cursor of the next page, if there is one.

    unusable: those that are there and cannot be opened, on every page.
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

    image: a data-URI or URL; or its embedding. metadata: a JSON object; without it the item has
    none.
    """

    model_config = ConfigDict(
        extra="forbid", json_schema_extra=exactly_one(image="string", embedding="array")
    )

    id: Annotated[str, Field(min_length=1)]
    image: str | None = None
    embedding: list[float] | None = None
    metadata: dict[str, Any] | None = None


class AddRequest(BaseModel):
    """A request to add items or replace those with the same id; each may fail alone."""

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

    outcome: unchanged where the embedding's bits and the metadata were the same. thumbnail: the
    version of its thumbnail, null where it has none.
    """

    index: int
    id: str
    outcome: SkipValidation[Literal["created", "updated", "unchanged"]]
    thumbnail: str | None = None


class RefusedItem(WireAnswer):
    """The error of one item that was not added.

    type: the image's error, or cannot-be-processed where another field cannot be used.
    """

    index: int
    type: SkipValidation[ImageReason | Literal["cannot-be-processed"]]
    title: str
    detail: str


class AddedItems(Provenance):
    """Outcomes of the items that were added and errors of the others, by index in the request.

    thumbnails: those of the collection; null where it has none, or is in a database.
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

    embedding: it has unit length; null where it was not asked for. thumbnail: the version of its
    thumbnail, null where it has none.
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
    """The outcome of one deletion; missing: the item was not in the collection."""

    id: str
    outcome: SkipValidation[Literal["deleted", "missing"]]


class DeletedItems(WireAnswer):
    """The outcomes of a deletion, in the order of the request."""

    collection: str
    results: list[DeletedItem]
