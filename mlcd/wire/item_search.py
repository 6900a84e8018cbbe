"""The answers of a search in a collection: matches, near-duplicates, places on the map."""

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

    ids: those of stored items. weight: the share of their mean that is subtracted from each query.
    """

    ids: Annotated[list[str], Field(min_length=1, max_length=64)]
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5


class SearchOptions(WireRequest):
    """The options of a search.

    filter: see docs/explanation/collections.md. threshold: the least cosine of a match. exact:
    compare with all items. metadata: false leaves the matches' metadata out. without: items that
    the matches are to be less like.
    """

    top: Annotated[WholeNumber, Field(ge=1)] = 10
    filter: dict[str, Any] | None = None
    threshold: Annotated[float, Field(ge=-1, le=1)] | None = None
    exact: bool = False
    metadata: bool = True
    without: WithoutItems | None = None


class SearchRequest(SearchOptions):
    """A search by one of images, texts, embeddings, id and ids; ids are those of stored items."""

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
    """A found item.

    similarity: the cosine. metadata: null where the request leaves them out. thumbnail: the version
    of its thumbnail, null where it has none.
    """

    id: str
    similarity: float
    metadata: dict[str, Any] | None
    thumbnail: str | None = None


class MatchedImage(WireAnswer):
    """The matches of one query, the most similar first."""

    index: int
    matches: list[ItemMatch]


class FoundItems(Provenance):
    """The most similar items of each query that could be made.

    exact: every item that matches was compared. matching: how many items the filter leaves.
    """

    collection: str
    exact: bool
    matching: int
    results: list[MatchedImage]
    errors: list[ItemError]


class DuplicatesRequest(WireRequest):
    """A request for near-duplicates.

    similarity: the least cosine of a pair. Without it, a pair's pictures have to be copies of one:
    smaller, compressed, cropped, mirrored or recolored.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"similarity": 0.95}]})

    similarity: Annotated[float, Field(ge=-1, le=1)] | None = None


class DuplicateGroup(WireAnswer):
    """A group of two items or more.

    similarities: each item's cosine to its nearest in the group. metadata, thumbnails: of each
    item; null where an item is gone or lacks a thumbnail.
    """

    ids: list[str]
    similarities: list[float]
    metadata: list[dict[str, Any] | None] = Field(default=[])
    thumbnails: list[str | None] = Field(default=[])


class FoundDuplicates(WireAnswer):
    """Groups of items that are joined by chains of pairs: of copies, or of at least the similarity.

    nearest: without any group, the pair that comes nearest to one; null where nothing is
    alike.
    """

    collection: str
    similarity: float | None
    groups: list[DuplicateGroup]
    nearest: DuplicateGroup | None = None


class LayoutLegendEntry(WireAnswer):
    """A value of the layout's items.

    index: its number in the array of values. value: the center's id, or the metadata's value. name:
    the center's name. items: how many items have it.
    """

    index: int
    value: str | float | bool | int
    name: str | None
    items: int


class LayoutLegend(WireAnswer):
    """The values behind the numbers, those of most items first; of more than 1,000 the first."""

    by: str
    values: list[LayoutLegendEntry]


class LayoutItemsRequest(WireRequest):
    """A request for items of the layout.

    positions: their rows in the layout. polygon: corners [x, y]; items inside it are chosen. None
    of both: all items. filter: as in a search. limit: how many items the answer names; files name
    all. layout: the digest in X-Mlcd-Layout that positions are of; another one is refused.
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
    """An item of the layout. position: its row there."""

    position: int
    id: str
    metadata: dict[str, Any]
    thumbnail: str | None


class LayoutItems(WireAnswer):
    """Items of the layout, in its order. total: how many were chosen."""

    collection: str
    total: int
    items: list[LayoutItem]
