"""Wire models of our own routes. Answers with vectors are described here and written without passing through here."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from mlcd.errors import ImageReason
from service.http.dialects.dialect import Dialect, Refusal
from service.http.dialects.schema import EXAMPLE_IMAGE, exactly_one

_PREFIX: Final = "urn:mlcd:problem:"


class Problem(BaseModel):
    """RFC 9457. type: urn:mlcd:problem: and a stable name. limit, index, param: where one applies."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:mlcd:problem:too-large",
                    "title": "Too large",
                    "status": 413,
                    "detail": "65 items in one request, more than 64: the limit max_images is stated in /v1/info",
                    "instance": "/v1/images/embed",
                    "request_id": "3f0c",
                    "limit": "max_images",
                }
            ]
        }
    )

    type: str
    title: str
    status: int
    detail: str
    instance: str
    request_id: str
    limit: str | None = None
    index: int | None = None
    param: str | None = None


def _refusal(refusal: Refusal) -> dict[str, Any]:
    extra = {"limit": refusal.limit, "index": refusal.index, "param": refusal.param}
    return {
        "type": _PREFIX + refusal.name,
        "title": refusal.title,
        "status": refusal.status,
        "detail": refusal.detail,
        "instance": refusal.instance,
        "request_id": refusal.request_id,
        **{name: value for name, value in extra.items() if value is not None},
    }


DIALECT: Final = Dialect(("",), "application/problem+json", Problem, _refusal)
"""Every path that is no other dialect's."""


class ItemError(BaseModel):
    """Why one image of a batch failed; the others are answered."""

    index: int
    type: ImageReason
    title: str
    detail: str


class Provenance(BaseModel):
    """What every answer says about the model behind it."""

    model: str
    fingerprint: str
    preprocess_version: int


class EmbeddedImage(BaseModel):
    """One unit row."""

    index: int
    embedding: list[float]


class EmbeddedImages(Provenance):
    """Rows of the images that succeeded, errors of the others, by their index in the request."""

    dimension: int
    results: list[EmbeddedImage]
    errors: list[ItemError]


class QueryRequest(BaseModel):
    """Give one of them. images: data-URIs or URLs; each may fail alone. embeddings: rows of the model's dimension."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"images": [EXAMPLE_IMAGE]}],
            **exactly_one(images="array", embeddings="array"),
        },
    )

    images: list[Any] | None = None
    embeddings: list[list[float]] | None = None


class SearchOptions(BaseModel):
    """filter: see docs/explanation/collections.md. threshold: the least cosine of what is found. exact: compare all.

    metadata: false leaves the matches' metadata out.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    top: Annotated[int, Field(ge=1)] = 10
    filter: dict[str, Any] | None = None
    threshold: Annotated[float, Field(ge=-1, le=1)] | None = None
    exact: bool = False
    metadata: bool = True


class SearchRequest(SearchOptions):
    """Give one of images, embeddings, id and ids: of items that are in the collection."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"images": [EXAMPLE_IMAGE], "top": 5},
                {"images": [EXAMPLE_IMAGE], "threshold": 0.5, "exact": True},
            ],
            **exactly_one(images="array", embeddings="array", id="string", ids="array"),
        }
    )

    images: list[Any] | None = None
    embeddings: list[list[float]] | None = None
    id: str | None = None
    ids: list[str] | None = None


class Example(BaseModel):
    """A sample near a center. collection: that holds it as an item; null: a member when the center was made.

    similarity: cosine with the center; null where the center has moved since, by training.
    """

    collection: str | None
    id: str
    similarity: float | None


class Label(BaseModel):
    """similarity: cosine with the center. examples: where they were asked for."""

    id: int
    similarity: float
    name: str | None
    examples: list[Example] | None = None


class LabeledImage(BaseModel):
    """Labels best first, equal similarities by the lower id."""

    index: int
    labels: list[Label]


class Audit(BaseModel):
    """recall: share of the exact `top` found on `rows` rows; low, high: its 95 % interval.

    source: whose rows: those that shipped with the centers, or of the collections.
    """

    recall: float
    low: float
    high: float
    rows: int
    source: Literal["centers", "collections"]
    top: int
    cells: int
    probes: int


class LabeledImages(Provenance):
    """centers: digest of the center set that ids refer to. audit: of approximate answers."""

    centers: str
    mode: Literal["exact", "approximate"]
    audit: Audit | None = None
    results: list[LabeledImage]
    errors: list[ItemError]


class DescribedCenter(Provenance):
    """size: members when it was clustered."""

    centers: str
    id: int
    size: int
    name: str | None
    nearest: list[Label]
    examples: list[Example]


class ItemMatch(BaseModel):
    """similarity: the cosine. metadata: null where the request leaves them out."""

    id: str
    similarity: float
    metadata: dict[str, Any] | None


class MatchedImage(BaseModel):
    """Matches most similar first."""

    index: int
    matches: list[ItemMatch]


class FoundItems(Provenance):
    """Of each query that could be made, the most similar items.

    exact: every item that matches was compared. matching: how many items the filter leaves.
    """

    collection: str
    exact: bool
    matching: int
    results: list[MatchedImage]
    errors: list[ItemError]


class CreateRequest(BaseModel):
    """dimension: that of the served model, or nothing. recall: recall@10 that the index has to show; 0.99."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"examples": [{"recall": 0.95}]}
    )

    dimension: Annotated[int, Field(ge=1)] | None = None
    recall: Annotated[float, Field(gt=0, le=0.995)] | None = None


class IndexRecall(BaseModel):
    """recall@10 on `queries` held-out items, with its interval of 95 %; rows: that the index held then."""

    target: float
    measured: float
    low: float
    high: float
    queries: int
    rows: int


class DescribedIndex(BaseModel):
    """kind: flat is none: searches are exact. indexed, unindexed: the latter are scanned beside it.

    effort: how far it looks. recall: null where searches are exact. damaged: it was, and is made again; until then
    searches are exact. error: why the last attempt to make it failed.
    """

    kind: Literal["flat", "hnsw", "ivf-sq8", "ivf-pq"]
    generation: int
    indexed: int
    unindexed: int
    effort: int | None
    target: float
    recall: IndexRecall | None
    damaged: bool
    error: str | None


class DescribedCollection(BaseModel):
    """usable: of the served model. writable: false where the server may only read it. fields: that filters can name."""

    name: str
    items: int
    dimension: int
    fingerprint: str
    usable: bool
    writable: bool
    fields: list[str]
    index: DescribedIndex


class CollectionList(BaseModel):
    """Every collection."""

    collections: list[DescribedCollection]


class DeletedCollection(BaseModel):
    """It is there no longer."""

    collection: str
    outcome: Literal["deleted"]


class GivenItem(BaseModel):
    """image: a data-URI or URL; or its embedding. metadata: a JSON object; without one, the item has none."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra=exactly_one(image="string", embedding="array")
    )

    id: Annotated[str, Field(min_length=1)]
    image: str | None = None
    embedding: list[float] | None = None
    metadata: dict[str, Any] | None = None


class AddRequest(BaseModel):
    """Items that are there afterward, each as it is given here; each may fail alone."""

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


class AddedItem(BaseModel):
    """outcome: unchanged where the embedding's bits and the metadata are those that were there."""

    index: int
    id: str
    outcome: Literal["created", "updated", "unchanged"]


class RefusedItem(BaseModel):
    """Why one item of a batch was not added; type: of its image, or that its other fields cannot be used."""

    index: int
    type: ImageReason | Literal["cannot-be-processed"]
    title: str
    detail: str


class AddedItems(Provenance):
    """Outcomes of the items that were added, errors of the others, by their index in the request."""

    collection: str
    results: list[AddedItem]
    errors: list[RefusedItem]


class MetadataRequest(BaseModel):
    """metadata: in place of all that the item has."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"metadata": {"album": "summer"}}]},
    )

    metadata: dict[str, Any]


class DescribedItem(BaseModel):
    """embedding: of unit length, where it was asked for."""

    collection: str
    id: str
    metadata: dict[str, Any]
    embedding: list[float] | None


class ChangedItem(BaseModel):
    """What became of it."""

    collection: str
    id: str
    outcome: Literal["updated", "unchanged", "deleted"]


class DuplicatesRequest(BaseModel):
    """similarity: the least cosine of a pair."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"examples": [{"similarity": 0.95}]}
    )

    similarity: Annotated[float, Field(ge=-1, le=1)] = 0.95


class DuplicateGroup(BaseModel):
    """Two items or more. similarities: of each, the cosine to the one of the others that is most like it."""

    ids: list[str]
    similarities: list[float]


class FoundDuplicates(BaseModel):
    """Groups that chains of pairs above the similarity join."""

    collection: str
    similarity: float
    groups: list[DuplicateGroup]


class LoadRequest(BaseModel):
    """version: as in Triton's repository; null: the newest there. unload: Triton then lets go of all others, which is
    false where other servers still use them.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"examples": [{"version": 2}]}
    )

    version: Annotated[int, Field(ge=1)] | None = None
    unload: bool = True


class Foreign(BaseModel):
    """What was made with another model, and the fingerprints of those: refused while this one is served."""

    centers: str | None
    collections: dict[str, str]


class LoadedModel(Provenance):
    """centers: digest of those in use."""

    version: int
    centers: str | None
    collections: list[str]
    foreign: Foreign


class CenterSet(BaseModel):
    """modes: exact, and approximate where the server was started so; then with its audit."""

    digest: str
    num_centers: int
    modes: list[Literal["exact", "approximate"]]
    audit: Audit | None


class Info(Provenance):
    """What is served, and within which limits."""

    version: str
    dimension: int
    engine: str
    precision: str
    preprocess: dict[str, Any]
    image_formats: list[str]
    centers: CenterSet | None
    collections: list[str]
    limits: dict[str, float] = Field(
        description="by name; errors carry the name of the one that was exceeded"
    )
