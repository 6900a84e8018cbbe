"""Reads all items of a collection in Milvus, by ranges of their keys.

Keys are evenly distributed, so a range of keys is a known share of the items, and reading by ranges
does not depend on the order of results.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from mlcd.collections.changes import Effect
from mlcd.collections.memory_state import Difference, check_fits
from mlcd.collections.milvus.connection import AnswerTooLarge, MilvusConnection
from mlcd.collections.milvus.item_records import KEY_CHARS, RECORD_BYTES, WHOLE, Record, key_of
from mlcd.collections.milvus.keyed_batch import read_keys, rows_per_message
from mlcd.collections.milvus.schemas import ITEMS
from mlcd.collections.searcher import Searcher

# target size of a response; a range whose response is too large is split into halves
ANSWER_BYTES: Final = 32 * 2**20
_LISTED_BYTES: Final = 200
_KEYS: Final = 16**KEY_CHARS


@dataclass(frozen=True)
class VersionedItems:
    """The items of one collection. identity: its name in Milvus."""

    connection: MilvusConnection
    identity: str
    dimension: int

    def __len__(self) -> int:
        return self.connection.count(self.identity, "row >= 0", ITEMS)

    def iter_records(self, first: float = 0.0, last: float = 1.0) -> Iterator[list[Record]]:
        """Yields the whole records of all items, in blocks.

        first, last: bounds in [0, 1] of the range of keys to read; a range is a random sample.
        """
        return self.list_items(WHOLE, 4 * self.dimension + RECORD_BYTES, first, last)

    def list_items(
        self, fields: Sequence[str], num_bytes: int, first: float = 0.0, last: float = 1.0
    ) -> Iterator[list[Record]]:
        """Yields the given fields of all items, in blocks.

        num_bytes: approximate size of these fields per item. first, last: see `iter_records`.
        """
        low, high = int(first * _KEYS), int(last * _KEYS)
        num = -(-int(len(self) * (last - first)) * num_bytes // ANSWER_BYTES) or 1
        for part in range(num):
            edges = (low + (high - low) * number // num for number in (part, part + 1))
            yield from self._range(fields, *edges)

    def _range(self, fields: Sequence[str], low: int, high: int) -> Iterator[list[Record]]:
        expression = f'key >= "{low:0{KEY_CHARS}x}"'
        if high < _KEYS:
            expression += f' and key < "{high:0{KEY_CHARS}x}"'
        try:
            yield self.connection.query(self.identity, expression, fields, ITEMS)
        except AnswerTooLarge:
            middle = (low + high) // 2
            yield from self._range(fields, low, middle)
            yield from self._range(fields, middle, high)

    @contextmanager
    def changes(
        self, earlier: Searcher, mark: dict[str, int] | None
    ) -> Iterator[Difference | None]:
        """Yields the changes since the versions `mark`, by id; see `ChangingItems`."""
        if mark is None:
            check_fits(len(self), "Milvus")
            versions: dict[str, int] = {}
            yield Difference(self._read_all(versions), versions)
            return
        new_versions = {
            record["id"]: record["version"]
            for records in self.list_items(("id", "version"), _LISTED_BYTES)
            for record in records
        }
        if new_versions == mark:
            yield None
            return
        check_fits(len(new_versions), "Milvus")
        changed = [
            item_id for item_id, version in new_versions.items() if mark.get(item_id) != version
        ]
        deleted = [item_id for item_id in mark if item_id not in new_versions]
        for item_id in changed:
            del new_versions[item_id]
        yield Difference(self._read_changes(deleted, changed, new_versions, earlier), new_versions)

    def _read_all(self, versions: dict[str, int]) -> Iterator[Effect]:
        for records in self.iter_records():
            for record in records:
                yield _effect(record, versions)

    def _read_changes(
        self, deleted: list[str], changed: list[str], versions: dict[str, int], earlier: Searcher
    ) -> Iterator[Effect]:
        for item_id in deleted:
            yield Effect(item_id)
        keys = [key_of(item_id) for item_id in changed]
        num = rows_per_message(self.dimension)
        for records in read_keys(self.connection, self.identity, keys, num):
            for record in records:
                yield _effect(record, versions)
        for item_id in changed:  # items deleted since they were listed
            if item_id not in versions and earlier.find(item_id) is not None:
                yield Effect(item_id)


def _effect(record: Record, versions: dict[str, int]) -> Effect:
    versions[record["id"]] = record["version"]
    vector = np.asarray(record["vector"], dtype=np.float32)
    return Effect(record["id"], record["row"], vector, record["metadata"])
