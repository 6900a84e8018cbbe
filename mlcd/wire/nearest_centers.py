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
    """A label of an image.

    similarity: cosine with the center. cluster: the one that the center belongs to, its own id but
    where clusters were merged. path: its clusters on the coarser levels, and its own id last; null
    without levels. examples: if they were asked for.
    """

    id: int
    similarity: float
    name: str | None
    cluster: int
    path: str | None = None
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


class NameTerm(WireAnswer):
    """A term of a cluster.

    share: of the members that have it. leading: of those whose best it is. elsewhere: of the other
    clusters' members that have it.
    """

    term: str
    score: float
    share: float
    leading: float
    elsewhere: float


class NameContrast(WireAnswer):
    """The term that most sets a cluster apart from its nearest one.

    center: the nearest one. share, there: the shares of the members of both that have the term.
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
    """The evidence for the name of a center, or why it has none.

    name: what the evidence says, which people may have changed since. margin: the lead of the best
    term's score over the next. by_chance: the best score where the members are dealt to the
    clusters at random. members: how many were asked. typical: of names from captions.
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
    """The images that the server process looked up last, 10,000 at most.

    images: how many. novelty: the share of these that lie beyond the distance from their center
    within which 95 % of its members lie; null without images.
    """

    images: int
    novelty: float | None


class DescribedCenter(Provenance):
    """A center.

    size: the number of its members in the clustering. cluster, path: as in a label. alternates,
    members, spread, novelty, recent: as in a list, members to novelty of the collection that the
    request names. evidence: that for the name; null where centers were never named from evidence.
    collections: those that examples were looked for in, at most four, where the request names none.
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

    cluster, path: as in a label. alternates: what the evidence for its name offers beside it. size:
    the number of its members in the clustering. members: the collection's items whose nearest
    center it is. spread: the mean of 1 - cosine of these to the center. novelty: the share of these
    that are farther from it than 95 % of the images that the list names in `novelty_from`. The
    three are null without a collection, the last two also without members. recent: of the queries
    whose nearest center it is.
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

    centers: the page. digest: that of the center set. total: how many centers the filters leave on
    all pages. next: the cursor of the next page, null on the last. novelty_from: the images whose
    distances from their centers are the ordinary ones: rows that ship with the centers, or the
    collection's items where there are none; null where both are too few. recent: of the images of
    all centers; null where the centers do not know their members' distances.
    """

    digest: str
    recent: RecentQueries | None
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

    others: number of items with other values. missing: number of items without a comparable value.
    """

    collection: str
    centers: str
    id: int
    field: str
    counts: list[CountedValue]
    others: int
    missing: int
