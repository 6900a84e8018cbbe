"""The results of a call: arrays and small values, with the model that computed them.

Answers without arrays are those of `mlcd.wire`.

N: items of a call. D: the model's dimension. L: labels per item.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import Rejection
from mlcd.types import Embeddings, Fingerprint, ShortRepr
from mlcd.wire.embedding import FittingName
from mlcd.wire.item_search import ItemMatch
from mlcd.wire.nearest_centers import Audit, Example, Label

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
    audit: Audit | None = None
    rounded: str | None = None


@dataclass(frozen=True)
class Answer(Generic[_Value]):
    """The answer to one batch: a value or an error for each item. The origin is missing where
    the server was not asked.
    """

    items: list[_Value | Rejection]
    origin: Origin | None


@dataclass(frozen=True, repr=False)
class Embedded(ShortRepr):
    """The embeddings of a series of images or texts.

    vectors: [N, D] float32, row i of item i; of unit norm, NaN where the item is in `errors`.
    """

    vectors: Embeddings
    errors: dict[int, Rejection]
    origin: Origin

    @classmethod
    def of(cls, items: Sequence[Row | Rejection], origin: Origin, *, dimension: int) -> "Embedded":
        """Joins rows and errors. dimension: of the model, which shapes a result without rows."""
        rows = {index: item for index, item in enumerate(items) if not isinstance(item, Rejection)}
        rows_found = np.stack(list(rows.values())) if rows else np.empty((0, dimension), np.float32)
        vectors = np.full((len(items), rows_found.shape[1]), np.nan, np.float32)
        vectors[list(rows)] = rows_found
        return cls(vectors, _errors(items), origin)


@dataclass(frozen=True, repr=False)
class Labeled(ShortRepr):
    """The nearest centers of each item, best first; L is the longest list's length.

    ids: [N, L] int32, -1 where there are fewer. scores: [N, L] float32, -inf there. clusters:
    [N, L] int32, those that the ids belong to, -1 there. names, paths, examples: those of the ids
    present. An item in `errors` has none.
    """

    ids: NDArray[np.int32]
    scores: NDArray[np.float32]
    clusters: NDArray[np.int32]
    paths: list[list[str | None]]
    names: list[list[str | None]]
    examples: list[list[list[Example]]]
    errors: dict[int, Rejection]
    origin: Origin

    @classmethod
    def of(cls, items: Sequence[list[Label] | Rejection], origin: Origin) -> "Labeled":
        lists = _lists(items)
        shape = len(lists), max(map(len, lists), default=0)
        ids, clusters = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
        scores = np.full(shape, -np.inf, np.float32)
        for row, labels in enumerate(lists):
            ids[row, : len(labels)] = [label.id for label in labels]
            scores[row, : len(labels)] = [label.similarity for label in labels]
            clusters[row, : len(labels)] = [label.cluster for label in labels]
        names = [[label.name for label in labels] for labels in lists]
        return cls(
            ids,
            scores,
            clusters,
            [[label.path for label in labels] for labels in lists],
            names,
            [[label.examples or [] for label in labels] for labels in lists],
            _errors(items),
            origin,
        )


@dataclass(frozen=True, repr=False)
class Found(ShortRepr):
    """The answer to a search.

    matches[i]: the indexed items most similar to query i, best first; empty where the query is in
    `errors`.
    """

    matches: list[list[ItemMatch]]
    errors: dict[int, Rejection]
    origin: Origin

    @classmethod
    def of(cls, items: Sequence[list[ItemMatch] | Rejection], origin: Origin) -> "Found":
        return cls(_lists(items), _errors(items), origin)


@dataclass(frozen=True, repr=False)
class Classified(ShortRepr):
    """The names that fit each image best, best first; L names of each.

    names: a list of L an image, empty where the image is in `errors`. probabilities, similarities:
    [N, L] float32, NaN there. Where the model judges each pair alone, the probabilities of an image
    do not add up to 1.
    """

    names: list[list[str]]
    probabilities: NDArray[np.float32]
    similarities: NDArray[np.float32]
    errors: dict[int, Rejection]
    origin: Origin

    @classmethod
    def of(cls, items: Sequence[list[FittingName] | Rejection], origin: Origin) -> "Classified":
        lists = _lists(items)
        shape = len(lists), max(map(len, lists), default=0)
        probabilities, similarities = (np.full(shape, np.nan, np.float32) for _ in range(2))
        for row, fitting in enumerate(lists):
            probabilities[row, : len(fitting)] = [name.probability for name in fitting]
            similarities[row, : len(fitting)] = [name.similarity for name in fitting]
        names = [[name.name for name in fitting] for fitting in lists]
        return cls(names, probabilities, similarities, _errors(items), origin)


@dataclass(frozen=True)
class Added:
    """The outcome of an addition.

    outcomes: created, updated or unchanged for each item; None where it is in `errors` and was not
    added.
    """

    outcomes: list[str | None]
    errors: dict[int, Rejection]
    origin: Origin

    @classmethod
    def of(cls, items: Sequence[str | Rejection], origin: Origin) -> "Added":
        outcomes = [None if isinstance(item, Rejection) else item for item in items]
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
    samples near it. alternates: what the evidence for its name offers beside it.
    """

    id: int
    size: int
    name: str | None
    nearest: list[Label]
    examples: list[Example]
    origin: Origin
    alternates: list[str] = field(default_factory=list)


def _errors(items: Sequence[_Value | Rejection]) -> dict[int, Rejection]:
    return {index: item for index, item in enumerate(items) if isinstance(item, Rejection)}


def _lists(items: Sequence[list[_Value] | Rejection]) -> list[list[_Value]]:
    return [[] if isinstance(item, Rejection) else item for item in items]


@dataclass(frozen=True, repr=False)
class Layout(ShortRepr):
    """A collection's items in the plane.

    points: float32 [N, 2], in [-1, 1], in an order that makes the first ones a fair sample. method:
    how they were made. digest: what names this very layout.
    """

    points: NDArray[np.float32]
    method: str
    digest: str
