"""The nearest centers of images and texts, and the centers with their members."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SkipValidation

from mlcd.wire.shapes import ItemError, Provenance, WireAnswer, WireRequest

LabelMode = Literal["exact", "approximate"]


class Example(WireAnswer):
    """A sample near a center.

    collection: collection that contains the sample; null for a member from the clustering.
    similarity: cosine with the center; null if training has moved the center since. thumbnail:
    version of its thumbnail, null without one.
    """

    collection: str | None
    id: str
    similarity: float | None
    thumbnail: str | None = None


class Label(WireAnswer):
    """A label of an image.

    id: id of the center. similarity: cosine with the center. cluster: cluster of the center; equal
    to `id` unless clusters were merged or aligned. path: clusters of the coarser levels, then the
    id itself; null without levels. examples: null unless requested.
    """

    id: int
    similarity: float
    name: str | None
    cluster: int
    path: str | None = None
    examples: list[Example] | None = None


class LabeledImage(WireAnswer):
    """The labels of one image, best first; ties are ordered by id."""

    index: int
    labels: list[Label]


class Audit(WireAnswer):
    """The measured recall of approximate labels.

    recall: share of the exact `top` labels found, on `rows` rows. low, high: its 95 % interval.
    source: whether the rows are part of the centers or of the collections. cells: number of cells
    of centers. probes: number of cells searched per row.
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

    centers: digest of the center set that ids refer to. audit: recall of approximate labels; null
    for exact labels.
    """

    centers: str
    mode: SkipValidation[LabelMode]
    audit: Audit | None = None
    results: list[LabeledImage]
    errors: list[ItemError]


class NameTerm(WireAnswer):
    """A term of a cluster.

    share: share of the cluster's members that have the term. leading: share of members whose best
    term it is. elsewhere: share of the other clusters' members that have it.
    """

    term: str
    score: float
    share: float
    leading: float
    elsewhere: float


class NameContrast(WireAnswer):
    """The term that best distinguishes a cluster from its nearest cluster.

    center: id of the nearest cluster. share: share of the cluster's members that have the term.
    there: share of the nearest cluster's members that have it.
    """

    center: int
    term: str
    share: float
    there: float


class TypicalCaption(WireAnswer):
    """The caption of a member that has most of its cluster's terms."""

    key: str
    caption: str


class NameGrounds(WireAnswer):
    """The evidence for the name of a center, or for leaving it unnamed.

    name: name by the evidence; users may have changed it since. margin: score of the best term
    minus score of the next. by_chance: best score after the members are shuffled among the
    clusters. members: number of members that were examined. unlike: contrast to the nearest
    cluster. typical: typical captions; null unless names are from captions.
    """

    name: str | None
    score: float
    margin: float
    by_chance: float
    members: int
    terms: list[NameTerm]
    unlike: NameContrast | None
    typical: list[TypicalCaption] | None = None


class RecentQueries(WireAnswer):
    """The images that the server process labeled last, at most 10,000.

    images: number of images. novelty: share of these images that are farther from their center than
    95 % of the center's members; null without images.
    """

    images: int
    novelty: float | None


class DescribedCenter(Provenance):
    """A center.

    centers: digest of the center set. size: number of members in the clustering. cluster, path: as
    in `Label`. alternates, members, spread, novelty, recent: as in `ListedCenter`; members, spread
    and novelty are of the collection that the request names. evidence: null if centers were never
    named from evidence. nearest: nearest other centers. collections: collections in which examples
    were searched, at most four, if the request names none.
    """

    centers: str
    id: int
    size: int
    name: str | None
    cluster: int
    path: str | None
    alternates: list[str]
    evidence: NameGrounds | None
    recent: RecentQueries | None
    members: int | None = None
    spread: float | None = None
    novelty: float | None = None
    nearest: list[Label]
    examples: list[Example]
    collections: list[str] = Field(default=[])


class ListedCenter(WireAnswer):
    """A center of a list.

    cluster, path: as in `Label`. alternates: other names that the evidence supports. size: number
    of members in the clustering. members: number of the collection's items whose nearest center it
    is. spread: mean of 1 - cosine of these items to the center. novelty: share of these items that
    are farther from the center than 95 % of the images of `novelty_from` (see `CenterList`).
    members, spread and novelty are null without a collection; spread and novelty also without
    members. recent: recent images whose nearest center it is.
    """

    id: int
    name: str | None
    cluster: int
    path: str | None
    alternates: list[str]
    size: int
    members: int | None
    spread: float | None
    novelty: float | None
    recent: RecentQueries | None
    examples: list[Example]


class CenterList(Provenance):
    """A page of centers.

    centers: the centers of this page. digest: digest of the center set. total: number of centers
    that match the filters, on all pages. next: cursor of the next page, null on the last.
    novelty_from: images that novelty compares with: members stored with the centers, or else the
    collection's items; null if both are too few. recent: recent images of all centers; null if the
    centers lack the distances of their members.
    """

    digest: str
    recent: RecentQueries | None
    novelty_from: SkipValidation[Literal["centers", "collection"]] | None
    collection: str | None
    centers: list[ListedCenter]
    next: str | None
    total: int


class NameRequest(WireRequest):
    """A request that names a center; null removes the name."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "lighthouse"}]})

    name: Annotated[str | None, Field(max_length=200)]


class RenamedCenter(WireAnswer):
    """A center whose name was changed.

    centers: digest of the center set. version: number of changes of names so far.
    """

    centers: str
    id: int
    name: str | None
    version: int


class Member(WireAnswer):
    """An item whose nearest center is the requested center. similarity: cosine with it."""

    id: str
    similarity: float
    metadata: dict[str, Any]
    thumbnail: str | None


class MemberList(WireAnswer):
    """A page of a center's members, nearest first. next: cursor of the next page, or null."""

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
    """The values of a metadata field among a center's members, most frequent first.

    others: number of items with other values. missing: number of items without a comparable value.
    """

    collection: str
    centers: str
    id: int
    field: str
    counts: list[CountedValue]
    others: int
    missing: int
