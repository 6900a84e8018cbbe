"""Wire models of our own routes. Answers with vectors are described here and written without passing through here."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mlcd.errors import ImageReason
from service.api.schemas.alternatives import exactly_one
from service.api.schemas.example import EXAMPLE_IMAGE


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


class SearchRequest(QueryRequest):
    """Give one of them. id: the key of an indexed item."""

    model_config = ConfigDict(json_schema_extra=exactly_one(images="array", embeddings="array", id="string"))

    id: str | None = None


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
    """id: the key of an indexed item."""

    id: str
    similarity: float
    class_name: str | None


class MatchedImage(BaseModel):
    """Matches most similar first."""

    index: int
    matches: list[ItemMatch]


class FoundItems(Provenance):
    """Of each query that could be made, the most similar items."""

    collection: str
    results: list[MatchedImage]
    errors: list[ItemError]


class Collection(BaseModel):
    """What can be searched."""

    name: str
    items: int
    dimension: int
    index: str
    fingerprint: str


class CollectionList(BaseModel):
    """Every collection."""

    collections: list[Collection]


class LoadRequest(BaseModel):
    """version: as in Triton's repository; null: the newest there. unload: Triton then lets go of all others, which is
    false where other servers still use them.
    """

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [{"version": 2}]})

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
    limits: dict[str, float] = Field(description="by name; errors carry the name of the one that was exceeded")
