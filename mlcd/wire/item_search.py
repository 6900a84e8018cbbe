"""Searches in a collection, near-duplicates, and the layout of its map."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from mlcd.wire.shapes import (
    EXAMPLE_IMAGE,
    ItemError,
    Provenance,
    WholeNumber,
    WireAnswer,
    WireRequest,
    exactly_one,
)


class WithoutItems(WireRequest):
    """Items that a search moves its queries away from.

    ids: ids of stored items. weight: factor of their mean when it is subtracted from each query.
    """

    ids: Annotated[list[str], Field(min_length=1, max_length=64)]
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5


class SearchOptions(WireRequest):
    """The options of a search.

    top: maximum number of matches per query. filter: see docs/explanation/collections.md.
    threshold: minimum cosine of a match. exact: compare with all items instead of using the index.
    metadata: false omits the matches' metadata. without: items that matches should not resemble.
    """

    top: Annotated[WholeNumber, Field(ge=1)] = 10
    filter: dict[str, Any] | None = None
    threshold: Annotated[float, Field(ge=-1, le=1)] | None = None
    exact: bool = False
    metadata: bool = True
    without: WithoutItems | None = None


class SearchRequest(SearchOptions):
    """A search by one of images, texts, embeddings, id and ids (of stored items)."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"images": [EXAMPLE_IMAGE], "top": 5},
                {"images": [EXAMPLE_IMAGE], "threshold": 0.5, "exact": True},
            ],
            **exactly_one(
                images="array", texts="array", embeddings="array", id="string", ids="array"
            ),
        }
    )

    images: list[Any] | None = None
    texts: list[str | Any] | None = None
    embeddings: list[list[float]] | None = None
    id: str | None = None
    ids: list[str] | None = None


class ItemMatch(WireAnswer):
    """A matching item.

    similarity: cosine with the query. metadata: null if the request omits it. thumbnail: version of
    its thumbnail, null without one.
    """

    id: str
    similarity: float
    metadata: dict[str, Any] | None
    thumbnail: str | None = None


class MatchedImage(WireAnswer):
    """The matches of one query, most similar first."""

    index: int
    matches: list[ItemMatch]


class FoundItems(Provenance):
    """The most similar items of each query, and the errors of queries that cannot be used.

    exact: whether every matching item was compared. matching: number of items that match the
    filter.
    """

    collection: str
    exact: bool
    matching: int
    results: list[MatchedImage]
    errors: list[ItemError]


class DuplicatesRequest(WireRequest):
    """A request for near-duplicates.

    similarity: minimum cosine of a pair. Without it, the two must be copies of the same picture:
    smaller, compressed, cropped, mirrored or recolored.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"similarity": 0.95}]})

    similarity: Annotated[float, Field(ge=-1, le=1)] | None = None


class DuplicateGroup(WireAnswer):
    """A group of two items or more.

    similarities: cosine of each item to its nearest item in the group. metadata, thumbnails: of
    each item; null if the item was deleted or lacks a thumbnail.
    """

    ids: list[str]
    similarities: list[float]
    metadata: list[dict[str, Any] | None] = Field(default=[])
    thumbnails: list[str | None] = Field(default=[])


class FoundDuplicates(WireAnswer):
    """Groups of items that are connected by near-duplicate pairs.

    similarity: minimum cosine of the pairs; null for copies. nearest: if no group exists, the
    most similar pair; null if no two items are similar.
    """

    collection: str
    similarity: float | None
    groups: list[DuplicateGroup]
    nearest: DuplicateGroup | None = None


class LayoutLegendEntry(WireAnswer):
    """A value of the layout's items.

    index: number of the value in the layout's array of values. value: id of a center, or value of a
    metadata field. name: name of the center. items: number of items with this value.
    """

    index: int
    value: str | float | bool | int
    name: str | None
    items: int


class LayoutLegend(WireAnswer):
    """The values that the layout's numbers refer to, most frequent first; at most 1,000."""

    by: str
    values: list[LayoutLegendEntry]


class LayoutItemsRequest(WireRequest):
    """A request for items of the layout.

    positions: rows of the items in the layout. polygon: corners [x, y]; selects the items inside.
    Without positions and polygon, all items are selected. filter: as in a search. limit: maximum
    number of items in the answer; files contain all. layout: digest in X-Mlcd-Layout of the layout
    that positions refer to; the request is refused if the layout has changed.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"polygon": [[-1, -1], [0, -1], [0, 0]], "limit": 60}, {"positions": [0]}]
        }
    )

    positions: (
        Annotated[list[Annotated[WholeNumber, Field(ge=0)]], Field(max_length=10_000)] | None
    ) = None
    polygon: (
        Annotated[
            list[Annotated[list[float], Field(min_length=2, max_length=2)]],
            Field(min_length=3, max_length=500),
        ]
        | None
    ) = None
    filter: dict[str, Any] | None = None
    limit: Annotated[WholeNumber, Field(ge=0, le=10_000)] = 60
    layout: str | None = None


class LayoutItem(WireAnswer):
    """An item of the layout. position: its row in the layout."""

    position: int
    id: str
    metadata: dict[str, Any]
    thumbnail: str | None


class LayoutItems(WireAnswer):
    """Items of the layout, in its order. total: number of selected items."""

    collection: str
    total: int
    items: list[LayoutItem]
