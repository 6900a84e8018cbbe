"""Write requests, and the effect of each on the ledger and on the state in memory."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from mlcd.collections.item import Item, check_new_id, encode_metadata, unit_embedding
from mlcd.collections.ledger import StoredItem
from mlcd.errors import InvalidInput, MlcdError, NotFound
from mlcd.images.thumbnail import Thumbnail
from mlcd.types import Embeddings

Outcome = Literal["created", "updated", "unchanged", "deleted", "missing"]
_SHOWN = 80


@dataclass(frozen=True)
class Effect:
    """A change of one item in memory: the item is removed and, unless `row` is None, added again
    with that row.

    vector: None keeps the item's present vector.
    """

    id: str
    row: int | None = None
    vector: Embeddings | None = None
    metadata: str = "{}"


class WrittenItems(Protocol):
    """The interface through which a request changes items in a transaction; see `Ledger`."""

    def find(self, item_id: str) -> StoredItem | None: ...
    def vectors(self, rows: Sequence[int], dimension: int) -> Embeddings: ...
    def insert(self, item_id: str, vector: Embeddings, metadata: str) -> int: ...
    def describe(self, item: StoredItem, metadata: str) -> None: ...
    def remove(self, row: int) -> None: ...


@dataclass
class Change:
    """A request and its result: `outcomes` once it is durable, or `error`."""

    request: "WriteRequest"
    outcomes: list[Outcome] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    error: BaseException | None = None
    settled: bool = False


class WriteRequest(Protocol):
    @property
    def thumbnails(self) -> Mapping[str, Thumbnail]:
        """Returns new thumbnails by item id; the items exist once the request is applied."""
        ...

    @property
    def ids(self) -> Sequence[str]:
        """Returns the ids of the items that the request changes."""
        ...

    def apply(self, ledger: WrittenItems, dimension: int) -> tuple[list[Outcome], list[Effect]]:
        """Applies the request within a transaction.

        Raises MlcdError only before it has written anything.
        """
        ...


@dataclass(frozen=True)
class Put:
    """A request to add or replace items.

    items: (id, unit vector [D], metadata as JSON). thumbnails: by item id.
    """

    items: Sequence[tuple[str, Embeddings, str]]
    thumbnails: Mapping[str, Thumbnail] = field(default_factory=dict)

    @property
    def ids(self) -> Sequence[str]:
        return [item_id for item_id, _, _ in self.items]

    def apply(self, ledger: WrittenItems, dimension: int) -> tuple[list[Outcome], list[Effect]]:
        outcomes: list[Outcome] = []
        effects: list[Effect] = []
        for item_id, vector, metadata in self.items:
            stored = ledger.find(item_id)
            if stored is None:
                outcomes.append("created")
                effects.append(
                    Effect(item_id, ledger.insert(item_id, vector, metadata), vector, metadata)
                )
            elif not np.array_equal(ledger.vectors([stored.row], dimension)[0], vector):
                ledger.remove(stored.row)
                outcomes.append("updated")
                effects.append(
                    Effect(item_id, ledger.insert(item_id, vector, metadata), vector, metadata)
                )
            elif stored.metadata != metadata:
                ledger.describe(stored, metadata)
                outcomes.append("updated")
                effects.append(Effect(item_id, stored.row, None, metadata))
            else:
                outcomes.append("unchanged")
        return outcomes, effects


@dataclass(frozen=True)
class Describe:
    """A request to replace the metadata of an existing item."""

    id: str
    metadata: str
    thumbnails: Mapping[str, Thumbnail] = field(default_factory=dict, init=False)

    @property
    def ids(self) -> Sequence[str]:
        return [self.id]

    def apply(
        self,
        ledger: WrittenItems,
        dimension: int,  # noqa: ARG002
    ) -> tuple[list[Outcome], list[Effect]]:
        stored = ledger.find(self.id)
        if stored is None:
            raise missing(self.id)
        if stored.metadata == self.metadata:
            return ["unchanged"], []
        ledger.describe(stored, self.metadata)
        return ["updated"], [Effect(self.id, stored.row, None, self.metadata)]


@dataclass(frozen=True)
class Delete:
    """A request to delete items; the outcome of a nonexistent item is `missing`."""

    ids: Sequence[str]
    thumbnails: Mapping[str, Thumbnail] = field(default_factory=dict, init=False)

    def apply(
        self,
        ledger: WrittenItems,
        dimension: int,  # noqa: ARG002
    ) -> tuple[list[Outcome], list[Effect]]:
        outcomes: list[Outcome] = []
        for item_id in self.ids:
            stored = ledger.find(item_id)
            if stored is not None:
                ledger.remove(stored.row)
            outcomes.append("missing" if stored is None else "deleted")
        deleted = zip(self.ids, outcomes, strict=True)
        return outcomes, [Effect(item_id) for item_id, outcome in deleted if outcome == "deleted"]


def put(items: Sequence[Item], dimension: int) -> Put:
    """Returns the request to add items.

    Raises InvalidInput naming the first invalid item.
    """
    encoded = []
    ids: set[str] = set()
    for item in items:
        item_id = check_new_id(item.id)
        if item_id in ids:
            raise InvalidInput(
                f"each id must be given once, got {item_id[:_SHOWN]!r} twice",
                remedy="leave out one of the two",
            )
        ids.add(item_id)
        vector = unit_embedding(item_id, item.embedding, dimension)
        encoded.append((item_id, vector, encode_metadata(item_id, item.metadata)))
    return Put(encoded, {item.id: item.thumbnail for item in items if item.thumbnail is not None})


class Transacted(WrittenItems, Protocol):
    """Items with transactions, which are atomic if their store can make them so."""

    def transaction(self) -> AbstractContextManager[object]: ...


def commit(ledger: Transacted, changes: Sequence[Change], dimension: int) -> None:
    """Writes all changes in one transaction, with one sync of the disk, and sets the outcomes or
    the error of each.

    NotFound fails only the change that raised it. If the transaction fails, all changes fail.
    """
    try:
        with ledger.transaction():
            for change in changes:
                try:
                    change.outcomes, change.effects = change.request.apply(ledger, dimension)
                except NotFound as error:
                    change.error = error
    except MlcdError as error:
        for change in changes:
            change.effects, change.error = [], error


def missing(item_id: str) -> NotFound:
    return NotFound(f"the collection lacks the item {item_id[:_SHOWN]!r}")
