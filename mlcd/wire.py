"""The REST contract: the bodies of requests and answers, as pydantic models.

The service validates bodies and writes answers by them, FastAPI documents them, and `mlcd.client`
reads answers into them. Answers with vectors are the exception: the service writes them from
arrays, and their models are documentation there.

A client may be older than its server. Answers therefore ignore unknown fields, and a value that is
marked `SkipValidation` may be one that is not known here.
"""

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SkipValidation,
    WithJsonSchema,
    create_model,
)

from mlcd.errors import ImageReason, TextReason
from mlcd.label_job import OPTIONS, JobKind

# A PNG of 4 x 4 pixels, black and white in columns.
EXAMPLE_IMAGE: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAQAAAAECAAAAACMmsGiAAAAFElEQVR42mNg+M/wn4mB"
    "gYEBQQAAIi4CBSsxuAQAAAAA"
    "SUVORK5CYII="
)


def exactly_one(**types: str | tuple[str, ...]) -> dict[str, JsonValue]:
    """Returns a schema by which exactly one of these fields is given, and not as null.

    types: each field's JSON type, or several of them.
    """
    return {
        "oneOf": [
            _given(name, [kind] if isinstance(kind, str) else list(kind))
            for name, kind in types.items()
        ]
    }


def _given(name: str, kinds: list[str]) -> JsonValue:
    return {"required": [name], "properties": {name: {"type": [*kinds]}}}


LabelMode = Literal["exact", "approximate"]
JobState = Literal["queued", "running", "succeeded", "failed", "canceled"]
JobStage = Literal["plan", "shard", "publish", "discard"]


class WireAnswer(BaseModel):
    """An answer, or a part of one."""

    model_config = ConfigDict(frozen=True)


class WireRequest(BaseModel):
    """The body of a request, without unknown fields and without conversions of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Problem(WireAnswer):
    """A refusal by RFC 9457.

    type: urn:mlcd:problem: and a stable name. limit, index, param: where one applies.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:mlcd:problem:too-large",
                    "title": "Too large",
                    "status": 413,
                    "detail": "65 items in one request, more than 64:"
                    " the limit max_images is stated in /v1/info",
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


class ItemError(WireAnswer):
    """The error of one image or text of a batch; the others are answered."""

    index: int
    type: SkipValidation[ImageReason | TextReason]
    title: str
    detail: str


class Provenance(WireAnswer):
    """The fields about the model that every answer has."""

    model: str
    fingerprint: str
    preprocess_version: int


class EmbeddedImage(WireAnswer):
    """The embedding of one image, of unit length."""

    index: int
    embedding: list[float]


class EmbeddedImages(Provenance):
    """Embeddings of the images that succeeded and errors of the others, by index in the request."""

    dimension: int
    results: list[EmbeddedImage]
    errors: list[ItemError]


class TextsRequest(WireRequest):
    """Texts to embed; each may fail alone."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"texts": ["a dog", "a red car"]}]})

    texts: Annotated[list[str | Any], Field(min_length=1)]


class EmbeddedText(WireAnswer):
    """The embedding of one text, of unit length."""

    index: int
    embedding: list[float]


class EmbeddedTexts(Provenance):
    """Embeddings of the texts that succeeded and errors of the others, by index in the request.

    tokens: of the texts together, without padding; of each at most the model's context.
    """

    dimension: int
    tokens: int
    results: list[EmbeddedText]
    errors: list[ItemError]


class QueryRequest(BaseModel):
    """Queries as images, as texts or as embeddings.

    images: data-URIs or URLs. texts: for a model that takes them. Each may fail alone. embeddings:
    rows of the model's dimension.
    """

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"images": [EXAMPLE_IMAGE]}],
            **exactly_one(images="array", texts="array", embeddings="array"),
        },
    )

    images: list[Any] | None = None
    texts: list[str | Any] | None = None
    embeddings: list[list[float]] | None = None


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

    top: Annotated[int, Field(ge=1)] = 10
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

    size: the number of its members in the clustering. members, spread, novelty: as in a list, of
    the collection that the request names.
    """

    centers: str
    id: int
    size: int
    name: str | None
    members: int | None = None
    spread: float | None = None
    novelty: float | None = None
    nearest: list[Label]
    examples: list[Example]


class ListedCenter(WireAnswer):
    """A center of a list.

    size: the number of its members in the clustering. members: the collection's items whose nearest
    center it is. spread: the mean of 1 - cosine of these to the center. novelty: the share of these
    that are farther from it than 95 % of the images that the list names in `novelty_from`. The
    three are null without a collection, the last two also without members.
    """

    id: int
    name: str | None
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


class PairCalibration(WireAnswer):
    """How the model turns the cosine of an image and a text into a probability.

    With a bias each pair is judged alone: sigmoid(scale * cosine + bias). With null the texts of an
    image compete: softmax over scale * cosine.
    """

    scale: float
    bias: float | None


class ClassifyOptions(WireRequest):
    """The options of a classification.

    templates: a set of templates, or templates of your own with the name's place {}; without them
    a name is a text as it is. top: names per image.
    """

    names: Annotated[list[str], Field(min_length=1)]
    templates: (
        Literal["simple", "clip"] | Annotated[list[str], Field(min_length=1, max_length=256)] | None
    ) = None
    top: Annotated[int, Field(ge=1)] = 10


class ClassifyRequest(ClassifyOptions):
    """Names, and one of images and embeddings to classify by them."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"images": [EXAMPLE_IMAGE], "names": ["stripes", "a dog"], "templates": "simple"}
            ],
            **exactly_one(images="array", embeddings="array"),
        }
    )

    images: list[Any] | None = None
    embeddings: list[list[float]] | None = None


class FittingName(WireAnswer):
    """A name with its probability for an image, and the cosine behind it."""

    name: str
    probability: float
    similarity: float


class ClassifiedImage(WireAnswer):
    """The names that fit one image, best first."""

    index: int
    names: list[FittingName]


class ClassifiedImages(Provenance):
    """The names of each image. calibration: how probabilities come from similarities."""

    calibration: PairCalibration
    results: list[ClassifiedImage]
    errors: list[ItemError]


class CreateRequest(WireRequest):
    """A request for a new collection.

    dimension: that of the served model, or nothing. recall: the recall@10 that the index must
    reach; 0.99 by default.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"recall": 0.95}]})

    dimension: Annotated[int, Field(ge=1)] | None = None
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

    kind: flat means that there is no index and searches are exact. indexed, unindexed: numbers of
    items; those that are not in the index are scanned beside it. effort: how far a search looks.
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


class DescribedCollection(WireAnswer):
    """A collection.

    usable: it holds embeddings of the served model. writable: false where the server may only read
    it. fields: those that filters can name.
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


class CollectionList(WireAnswer):
    """The list of all collections."""

    collections: list[DescribedCollection]


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

    thumbnails: those of the collection; null where it has none.
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
    """The outcome of one deletion; missing: there was no such item."""

    id: str
    outcome: SkipValidation[Literal["deleted", "missing"]]


class DeletedItems(WireAnswer):
    """The outcomes of a deletion, in the order of the request."""

    collection: str
    results: list[DeletedItem]


class DuplicatesRequest(WireRequest):
    """A request for near-duplicates. similarity: the least cosine of a pair."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"similarity": 0.95}]})

    similarity: Annotated[float, Field(ge=-1, le=1)] = 0.95


class DuplicateGroup(WireAnswer):
    """A group of two items or more.

    similarities: each item's cosine to its nearest in it. metadata, thumbnails: those of each item;
    null where an item is gone or has no thumbnail.
    """

    ids: list[str]
    similarities: list[float]
    metadata: list[dict[str, Any] | None] = []
    thumbnails: list[str | None] = []


class FoundDuplicates(WireAnswer):
    """Groups of items that are joined by chains of pairs of at least the similarity."""

    collection: str
    similarity: float
    groups: list[DuplicateGroup]


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

    positions: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=10_000)] | None = None
    polygon: (
        Annotated[
            list[Annotated[list[float], Field(min_length=2, max_length=2)]],
            Field(min_length=3, max_length=500),
        ]
        | None
    ) = None
    filter: dict[str, Any] | None = None
    limit: Annotated[int, Field(ge=0, le=10_000)] = 60
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


class LoadRequest(WireRequest):
    """A request to switch to another version of the model.

    version: as in Triton's repository; null: the newest there. unload: Triton then unloads all
    other versions; set it to false where other servers still use them.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": 2}]})

    version: Annotated[int, Field(ge=1)] | None = None
    unload: bool = True


class Foreign(WireAnswer):
    """Centers and collections of other models, with their fingerprints.

    Requests for them are refused while this model is served.
    """

    centers: str | None
    collections: dict[str, str]


class LoadedModel(Provenance):
    """The model that is served now. centers: digest of those in use."""

    version: int
    centers: str | None
    collections: list[str]
    foreign: Foreign


class CenterSet(WireAnswer):
    """The centers in use.

    modes: exact, and approximate where the server's settings allow it; then with its audit.
    """

    digest: str
    num_centers: int
    modes: list[SkipValidation[LabelMode]]
    audit: Audit | None


class DescribedTexts(WireAnswer):
    """The tower of texts. context_length: tokens of one text that the model reads."""

    context_length: int
    engine: str
    precision: str
    calibration: PairCalibration


class Info(Provenance):
    """The served model and the limits. texts: null where the model embeds images only."""

    version: str
    dimension: int
    engine: str
    precision: str
    preprocess: dict[str, Any]
    image_formats: list[str]
    texts: DescribedTexts | None = None
    centers: CenterSet | None
    collections: list[str]
    limits: dict[str, Annotated[int | float, WithJsonSchema({"type": "number"})]] = Field(
        description="by name; errors carry the name of the one that was exceeded"
    )


_Path = Annotated[str, Field(min_length=1, max_length=4096)]
# An option that is null or missing has the default of `LabelJob`.
_OPTIONS: Any = {name: (kind | None, None) for name, kind in OPTIONS.items()}
_JobOptions: Any = create_model("_JobOptions", __base__=WireRequest, **_OPTIONS)


class JobRequest(_JobOptions):
    """A request for a job.

    input: a folder, a glob of tar shards or parquet files, or one file, as workers see it. output:
    a directory that does not exist yet. top, threshold, embeddings (written beside the labels):
    options of `label` jobs only; one that is null or missing has its default.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "kind": "label",
                    "input": "/data/archive/*.tar",
                    "output": "/data/labels",
                    "top": 8,
                }
            ]
        }
    )

    kind: JobKind
    input: _Path
    output: _Path


class JobFailure(WireAnswer):
    """The reason of a failure. code: stable."""

    code: str
    message: str
    remedy: str | None


class JobProgress(WireAnswer):
    """The progress of a job.

    shards, images: null until the input has been listed. done: images, failed ones included.
    failed_items: images that errors.jsonl names. damaged_files: files of the input that could not
    be listed to their end. stage: null when nothing is left to do. collected, indexed: of `index`
    jobs only, images in the collection and in its index. images_per_s: of all workers together,
    over the time in which there was one. eta_s: seconds until all images are done, where known.
    """

    shards: int | None
    shards_done: int
    shards_failed: int
    images: int | None
    done: int
    failed_items: int
    damaged_files: int
    stage: SkipValidation[JobStage] | None
    collected: int | None
    indexed: int | None
    images_per_s: float | None
    eta_s: float | None


class Job(WireAnswer):
    """A batch job as it stands.

    fingerprint, centers: those of the model and the center set that it was accepted for. top,
    threshold, embeddings: null where the job makes no labels. problem: why the job has failed;
    before its end, why a shard has failed or why no worker does it.
    """

    id: str
    kind: SkipValidation[JobKind]
    state: SkipValidation[JobState]
    input: str
    output: str
    fingerprint: str
    centers: str | None
    top: int | None
    threshold: float | None
    embeddings: bool | None
    created: datetime
    started: datetime | None
    ended: datetime | None
    progress: JobProgress
    problem: JobFailure | None


class JobList(WireAnswer):
    """A page of jobs, newest first. cursor: of the next page, null on the last."""

    jobs: list[Job]
    cursor: str | None


class FailedShard(WireAnswer):
    """A shard that was left aside. images: in it. problem: that of the last attempt."""

    shard: int
    images: int
    problem: JobFailure


class FailureList(WireAnswer):
    """A page of failures by ascending shard. cursor: the next page's, null on the last."""

    failures: list[FailedShard]
    cursor: int | None
