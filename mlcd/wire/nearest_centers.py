"""The nearest centers of images and texts, and the centers with their members."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SkipValidation

from mlcd.wire.shapes import ItemError, Provenance, WireAnswer, WireRequest

LabelMode = Literal["exact", "approximate"]


class Example(WireAnswer):
    """A sample near a center.

    collection: the one that holds it as an item; null for a member of the cluster behind the
    center. similarity: cosine with the center; null where training has moved the center since.
    thumbnail: the version of its thumbnail; null where it has none.
    """

    collection: str | None
    id: str
    similarity: float | None
    thumbnail: str | None = None


class Label(WireAnswer):
    """A label of an image. similarity: cosine with the center. examples: if they were asked for."""

    id: int
    similarity: float
    name: str | None
    examples: list[Example] | None = None


class LabeledImage(WireAnswer):
    """The labels of one image, best first; among equal similarities the lower id is first."""

    index: int
    labels: list[Label]


class Audit(WireAnswer):
    """The measured recall of approximate labels.

    recall: share of the exact `top` found on `rows` rows. low, high: its 95 % interval. source: the
    rows shipped with the centers, or are those of the collections.
    """

    recall: float
    low: float
    high: float
    rows: int
    source: SkipValidation[Literal["centers", "collections"]]
    top: int
    cells: int
    probes: int


class LabeledImages(Provenance):
    """The labels of images.

    centers: digest of the center set that ids refer to. audit: that of approximate answers.
    """

    centers: str
    mode: SkipValidation[LabelMode]
    audit: Audit | None = None
    results: list[LabeledImage]
    errors: list[ItemError]


class DescribedCenter(Provenance):
    """A center.

    size: the number of its members in the clustering. alternates, members, spread, novelty: as in
    a list, the last three of the collection that the request names.
    """

    centers: str
    id: int
    size: int
    name: str | None
    alternates: list[str]
    members: int | None = None
    spread: float | None = None
    novelty: float | None = None
    nearest: list[Label]
    examples: list[Example]


class ListedCenter(WireAnswer):
    """A center of a list.

    alternates: what the evidence for its name offers beside it. size: the number of its members in
    the clustering. members: the collection's items whose nearest
    center it is. spread: the mean of 1 - cosine of these to the center. novelty: the share of these
    that are farther from it than 95 % of the images that the list names in `novelty_from`. The
    three are null without a collection, the last two also without members.
    """

    id: int
    name: str | None
    alternates: list[str]
    size: int
    members: int | None
    spread: float | None
    novelty: float | None
    examples: list[Example]


class CenterList(Provenance):
    """A page of centers.

    centers: the page. digest: that of the center set. total: how many centers the filters leave on
    all pages. next: the cursor of the next page, null on the last. novelty_from: the images whose
    distances from their centers are the ordinary ones: rows that ship with the centers, or the
    collection's items where there are none; null where both are too few.
    """

    digest: str
    novelty_from: SkipValidation[Literal["centers", "collection"]] | None
    collection: str | None
    centers: list[ListedCenter]
    next: str | None
    total: int


class NameRequest(WireRequest):
    """A request that names a center; null takes its name away."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "lighthouse"}]})

    name: Annotated[str | None, Field(max_length=200)]


class RenamedCenter(WireAnswer):
    """A center whose name was changed.

    centers: digest of the center set. version: the number of changes of names so far.
    """

    centers: str
    id: int
    name: str | None
    version: int


class Member(WireAnswer):
    """An item whose nearest center is the one in question. similarity: cosine with the center."""

    id: str
    similarity: float
    metadata: dict[str, Any]
    thumbnail: str | None


class MemberList(WireAnswer):
    """A page of a center's members, the nearest first. next: the next page's cursor."""

    collection: str
    centers: str
    id: int
    total: int
    members: list[Member]
    next: str | None


class CountedValue(WireAnswer):
    """A value of a metadata field, and the number of items that have it."""

    value: str | float | bool
    items: int


class CountedValues(WireAnswer):
    """The values of a metadata field among a center's members, the most frequent first.

    others: items that have none of these values but another one. missing: items without a value
    that can be compared.
    """

    collection: str
    centers: str
    id: int
    field: str
    counts: list[CountedValue]
    others: int
    missing: int
