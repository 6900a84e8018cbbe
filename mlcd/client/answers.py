"""The results of a call: arrays and small values, with the model that computed them.

N: items of a call. D: the model's dimension. L: labels per item.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ImageRejected
from mlcd.types import Embeddings, Fingerprint

Mode = Literal["exact", "approximate"]
JobKind = Literal["label", "embed", "index"]
JobState = Literal["queued", "running", "succeeded", "failed", "canceled"]
Row: TypeAlias = NDArray[np.float32]

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Origin:
    """The model and centers that computed an answer; answers of two origins are never mixed.

    centers: digest of the server's center set, where the answer states it. audit: of approximate
    labels, as the server measured it. rounded: the type that the server rounds vectors to, None
    where they are exact.
    """

    model: str
    fingerprint: Fingerprint
    preprocess_version: int
    centers: str | None = None
    audit: dict[str, Any] | None = None
    rounded: str | None = None


@dataclass(frozen=True)
class Answer(Generic[_Value]):
    """The answer to one batch: a value or an error for each item. It has no origin where the server
    was not asked.
    """

    items: list[_Value | ImageRejected]
    origin: Origin | None


@dataclass(frozen=True)
class Embedded:
    """The embeddings of a series of images.

    vectors: [N, D] float32, row i of image i; of unit norm, NaN where the image is in `errors`.
    """

    vectors: Embeddings
    errors: dict[int, ImageRejected]
    origin: Origin

    @classmethod
    def of(
        cls, items: Sequence[Row | ImageRejected], origin: Origin, *, dimension: int
    ) -> "Embedded":
        """Joins rows and errors. dimension: that of the model, which shapes the result where there
        is no row.
        """
        rows = {
            index: item for index, item in enumerate(items) if not isinstance(item, ImageRejected)
        }
        found = np.stack(list(rows.values())) if rows else np.empty((0, dimension), np.float32)
        vectors = np.full((len(items), found.shape[1]), np.nan, np.float32)
        vectors[list(rows)] = found
        return cls(vectors, _errors(items), origin)


@dataclass(frozen=True)
class Example:
    """A sample near a center.

    collection: the one that holds it as an item; None for a member of the center when it was made.
    similarity: its cosine with the center; None where the server does not know it.
    """

    collection: str | None
    id: str
    similarity: float | None


@dataclass(frozen=True)
class Label:
    """A center, with its cosine similarity. examples: as many of its members as were requested."""

    id: int
    similarity: float
    name: str | None
    examples: list[Example] = field(default_factory=list)


@dataclass(frozen=True)
class Labeled:
    """The nearest centers of each item, best first; L is the longest list's length.

    ids: [N, L] int32, -1 where there are fewer. scores: [N, L] float32, -inf there. names,
    examples: those of the ids present. An image in `errors` has none.
    """

    ids: NDArray[np.int32]
    scores: NDArray[np.float32]
    names: list[list[str | None]]
    examples: list[list[list[Example]]]
    errors: dict[int, ImageRejected]
    origin: Origin

    @classmethod
    def of(cls, items: Sequence[list[Label] | ImageRejected], origin: Origin) -> "Labeled":
        lists = _lists(items)
        shape = len(lists), max(map(len, lists), default=0)
        ids, scores = np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32)
        for row, labels in enumerate(lists):
            ids[row, : len(labels)] = [label.id for label in labels]
            scores[row, : len(labels)] = [label.similarity for label in labels]
        names = [[label.name for label in labels] for labels in lists]
        return cls(
            ids,
            scores,
            names,
            [[label.examples for label in labels] for labels in lists],
            _errors(items),
            origin,
        )


@dataclass(frozen=True)
class Match:
    """An item, and the cosine of its embedding with the query. metadata: None where it was left
    out.
    """

    id: str
    similarity: float
    metadata: dict[str, Any] | None


@dataclass(frozen=True)
class Found:
    """The answer to a search.

    matches[i]: the indexed items most similar to query i, best first; empty where the query is in
    `errors`.
    """

    matches: list[list[Match]]
    errors: dict[int, ImageRejected]
    origin: Origin

    @classmethod
    def of(cls, items: Sequence[list[Match] | ImageRejected], origin: Origin) -> "Found":
        return cls(_lists(items), _errors(items), origin)


@dataclass(frozen=True)
class Collection:
    """A collection of the server.

    usable: it belongs to the served model. writable: the server may change it. fields: those that
    filters can name. index: its kind and its measured recall, as the server states it.
    """

    name: str
    items: int
    dimension: int
    fingerprint: Fingerprint
    usable: bool
    writable: bool
    fields: list[str]
    index: dict[str, Any]


@dataclass(frozen=True)
class Added:
    """The outcome of an addition.

    outcomes: created, updated or unchanged for each item; None where it is in `errors` and was not
    added.
    """

    outcomes: list[str | None]
    errors: dict[int, ImageRejected]
    origin: Origin

    @classmethod
    def of(cls, items: Sequence[str | ImageRejected], origin: Origin) -> "Added":
        outcomes = [None if isinstance(item, ImageRejected) else item for item in items]
        return cls(outcomes, _errors(items), origin)


@dataclass(frozen=True)
class Item:
    """One item of a collection. embedding: [D] float32 of unit norm."""

    id: str
    metadata: dict[str, Any]
    embedding: Row


@dataclass(frozen=True)
class Center:
    """One center. size: its members when it was clustered. nearest: other centers. examples:
    samples near it.
    """

    id: int
    size: int
    name: str | None
    nearest: list[Label]
    examples: list[Example]
    origin: Origin


@dataclass(frozen=True)
class CenterSet:
    """The set of centers that labels refer to. audit: that of the approximate mode, where the
    server has it.
    """

    digest: str
    num_centers: int
    modes: list[Mode]
    audit: dict[str, Any] | None


@dataclass(frozen=True)
class Info:
    """The served model and its limits, which have the names that errors give."""

    model: str
    fingerprint: Fingerprint
    preprocess_version: int
    version: str
    dimension: int
    engine: str
    precision: str
    preprocess: dict[str, Any]
    image_formats: list[str]
    centers: CenterSet | None
    collections: list[str]
    limits: dict[str, float]

    @property
    def origin(self) -> Origin:
        centers = None if self.centers is None else self.centers.digest
        return Origin(self.model, self.fingerprint, self.preprocess_version, centers)


@dataclass(frozen=True)
class JobFailure:
    """Why a job or a shard has failed. code: stable."""

    code: str
    message: str
    remedy: str | None


@dataclass(frozen=True)
class JobProgress:
    """How far a job is.

    shards, images: None until the input has been listed. done: images, failed ones included.
    failed_items: images that errors.jsonl names. damaged_files: files of the input that could not
    be listed to their end. stage: plan, shard, publish or discard; None when nothing is left to do.
    collected, indexed: images in the collection of an index job, and in its index. images_per_s: of
    all workers together. eta_s: seconds until all images are done, where known.
    """

    shards: int | None
    shards_done: int
    shards_failed: int
    images: int | None
    done: int
    failed_items: int
    damaged_files: int
    stage: str | None
    collected: int | None
    indexed: int | None
    images_per_s: float | None
    eta_s: float | None


@dataclass(frozen=True)
class Job:
    """A batch job as it stands. fingerprint, centers: the model and the center set that it was
    accepted for.

    top, threshold, embeddings: None where the job makes no labels. problem: why the job has failed;
    before its end, why a shard has failed or why no worker does it.
    """

    id: str
    kind: JobKind
    state: JobState
    input: str
    output: str
    fingerprint: Fingerprint
    centers: str | None
    top: int | None
    threshold: float | None
    embeddings: bool | None
    created: datetime
    started: datetime | None
    ended: datetime | None
    progress: JobProgress
    problem: JobFailure | None


@dataclass(frozen=True)
class FailedShard:
    """A shard that was left aside. images: in it. problem: of the last attempt."""

    shard: int
    images: int
    problem: JobFailure


def _errors(items: Sequence[_Value | ImageRejected]) -> dict[int, ImageRejected]:
    return {index: item for index, item in enumerate(items) if isinstance(item, ImageRejected)}


def _lists(items: Sequence[list[_Value] | ImageRejected]) -> list[list[_Value]]:
    return [[] if isinstance(item, ImageRejected) else item for item in items]
