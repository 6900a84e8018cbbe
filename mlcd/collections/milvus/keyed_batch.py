"""Collects the changes of several requests, then writes them to Milvus by key."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from mlcd.collections.item import MAX_METADATA_BYTES
from mlcd.collections.ledger import StoredItem
from mlcd.collections.milvus.connection import MilvusConnection
from mlcd.collections.milvus.expressions import quote_list
from mlcd.collections.milvus.item_records import (
    RECORD_BYTES,
    WHOLE,
    Record,
    draw_number,
    key_of,
    record_of,
)
from mlcd.collections.milvus.known_facts import KnownFacts
from mlcd.collections.milvus.schemas import ITEMS
from mlcd.collections.milvus.thumbnails import MilvusThumbnails
from mlcd.types import Embeddings

# bytes per message; Milvus accepts 64 MB
_MESSAGE_BYTES: Final = 24 * 2**20
_MESSAGE_KEYS: Final = 8192
T = TypeVar("T")


def rows_per_message(dimension: int) -> int:
    """Returns how many whole records fit in one message, with metadata of the greatest size."""
    return max(1, _MESSAGE_BYTES // (4 * dimension + MAX_METADATA_BYTES + RECORD_BYTES))


def split(values: Sequence[T], num: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), num):
        yield values[start : start + num]


def read_keys(
    connection: MilvusConnection,
    identity: str,
    keys: Sequence[str],
    num: int,
    fields: Sequence[str] = WHOLE,
) -> Iterator[list[Record]]:
    """Yields the existing records of these keys, for `num` keys at a time."""
    for part in split(keys, num):
        yield connection.query(identity, f"key in {quote_list(part)}", fields, ITEMS)


@dataclass
class KeyedBatch:
    """The changes of several requests. Replacing an item is one upsert, in which Milvus adds the
    new version before it removes the old one.
    """

    connection: MilvusConnection
    facts: KnownFacts
    pictures: MilvusThumbnails
    ids: Sequence[str]
    _stored: dict[str, StoredItem] = field(default_factory=dict)
    _vectors: dict[int, Embeddings] = field(default_factory=dict)
    _ids: dict[int, str] = field(default_factory=dict)
    _removed: set[str] = field(default_factory=set)  # ids that are deleted or get a new vector
    _written: dict[str, Record | None] = field(default_factory=dict)  # None: deleted

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Reads the stored items, and writes the changes at the end of the block."""
        identity, num = self.facts.identity, rows_per_message(self.facts.dimension)
        keys = sorted({key_of(item_id) for item_id in self.ids})
        for records in read_keys(self.connection, identity, keys, num):
            for record in records:
                vector = np.asarray(record["vector"], dtype=np.float32)
                self._remember(record["id"], record["row"], vector, record["metadata"])
        yield
        written = [record for record in self._written.values() if record is not None]
        self.facts.add_fields(name for record in written for name in json.loads(record["metadata"]))
        self.pictures.remove(self._removed)
        deleted_keys = sorted(
            key_of(item_id) for item_id, record in self._written.items() if record is None
        )
        for batch in split(deleted_keys, _MESSAGE_KEYS):
            self.connection.delete(identity, f"key in {quote_list(batch)}", ITEMS)
        for part in split(written, num):
            self.connection.upsert(identity, part, ITEMS)

    def find(self, item_id: str) -> StoredItem | None:
        return self._stored.get(item_id)

    def vectors(self, rows: Sequence[int], dimension: int) -> Embeddings:  # noqa: ARG002
        return np.stack([self._vectors[row] for row in rows])

    def insert(self, item_id: str, vector: Embeddings, metadata: str) -> int:
        row = draw_number()
        self._remember(item_id, row, vector, metadata)
        self._written[item_id] = record_of(item_id, row, vector, metadata)
        return row

    def describe(self, item: StoredItem, metadata: str) -> None:
        vector = self._vectors[item.row]
        self._remember(item.id, item.row, vector, metadata)
        self._written[item.id] = record_of(item.id, item.row, vector, metadata)

    def remove(self, row: int) -> None:
        item_id = self._ids[row]
        self._stored.pop(item_id)
        self._removed.add(item_id)
        self._written[item_id] = None

    def _remember(self, item_id: str, row: int, vector: Embeddings, metadata: str) -> None:
        self._stored[item_id] = StoredItem(row, item_id, metadata)
        self._vectors[row], self._ids[row] = vector, item_id
