"""A collection in Milvus: many servers can write and search it at the same time.

Every read waits until Milvus has applied all writes acknowledged before it (`Strong`). Results of
its index are rescored in float32. Searches that Milvus cannot answer as promised, by filter or by
recall, use all items in memory.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.collections.changes import Change, Outcome, WriteRequest, commit, missing
from mlcd.collections.filters import parse_filter
from mlcd.collections.item import FoundItem, Item, check_id
from mlcd.collections.memory_state import IN_MEMORY, MOST_ITEMS
from mlcd.collections.milvus import copied_audit
from mlcd.collections.milvus.connection import AnswerTooLarge, MilvusConnection
from mlcd.collections.milvus.expressions import (
    ALL_ITEMS,
    MilvusFilter,
    quote_list,
    translate_filter,
)
from mlcd.collections.milvus.index_kinds import INDEX_KINDS
from mlcd.collections.milvus.item_records import WHOLE, Record, key_of, read_rows
from mlcd.collections.milvus.keyed_batch import KeyedBatch, read_keys, rows_per_message, split
from mlcd.collections.milvus.known_facts import KnownFacts
from mlcd.collections.milvus.schemas import ITEMS, PinnedCollection
from mlcd.collections.milvus.thumbnails import MAX_BYTES, MilvusThumbnails, new_pictures
from mlcd.collections.milvus.versioned_items import VersionedItems
from mlcd.collections.port import Description, Promises
from mlcd.collections.remote_collection import COPIED_ROWS, RemoteCollection, choose_effort
from mlcd.collections.search_checks import check_queries
from mlcd.collections.searcher import SearchAnswer
from mlcd.collections.waiting_changes import WaitingChanges
from mlcd.images.thumbnail import Thumbnail
from mlcd.types import Embeddings, min_dot_product

_CONSISTENCY: Final = (
    "a search sees every change that any server acknowledged before it began (Milvus's consistency"
    " level Strong)"
)
_CANNOT: Final = (
    f"thumbnails are not bounded as a whole, and none above {MAX_BYTES:,} bytes is kept",
    "a call that changes several items is not a transaction: after a failure some may be changed",
    "if two servers change an item at once, both may report success and one change be lost",
    "the thumbnail of such an item may be that of the lost change",
    "an item that one server deletes may come back if another writes its metadata meanwhile",
    "acknowledged writes survive a power cut only where Milvus syncs its log; standalone does not",
    IN_MEMORY,
    "exact searches of many items, bounds on lists and searches before an audit use it, too",
    "a copy of more than 32 MB is not a snapshot: it may or may not have changes made meanwhile",
    "recall is audited on a second index of nearly all items, not on the index that is searched",
    "an interim index finds items that Milvus has not indexed yet; its recall is not audited",
)
_SCAN_AT_MOST: Final = 2000  # matching items, up to which all of them are compared
_CACHED_COUNTS: Final = 128
_AUDIT_GROWTH: Final = 2  # recall is measured again at this multiple of the audited items
_CHECK_ITEMS: Final = 1000  # written items, after which an audit may be due
_WRITTEN_ITEMS: Final = 4096  # items per batch
_LISTED_BYTES: Final = 200
_UNBOUNDED: Final = 2**40


class MilvusCollection(RemoteCollection):
    """A collection in Milvus."""

    def __init__(
        self,
        connection: MilvusConnection,
        pinned: PinnedCollection,
        pool: ThreadPoolExecutor,
        *,
        background: bool,
    ) -> None:
        """pool: threads for concurrent requests to Milvus."""
        self.identity = pinned.identity
        self._items = VersionedItems(connection, pinned.identity, pinned.dimension)
        super().__init__(
            pinned.name,
            pinned.fingerprint,
            pinned.dimension,
            pinned.recall,
            Promises("milvus", "many", _CONSISTENCY, _CANNOT),
            self._items,
        )
        self._connection, self._index_kind = connection, INDEX_KINDS[pinned.index]
        self._pool, self._background = pool, background
        self._pictures = MilvusThumbnails(connection, pinned.identity)
        self._facts = KnownFacts(connection, pinned.identity, pinned.dimension)
        # Looking up the stored items takes as long for a batch as for one item.
        self._changes = WaitingChanges(self._write, batch_size=_WRITTEN_ITEMS, size=_num_items)
        self._counts: dict[str, int] = {}
        self._unchecked = _CHECK_ITEMS

    def __len__(self) -> int:
        return len(self._items)

    def get(self, item_id: str) -> Item:
        record = self._find(check_id(item_id), WHOLE)
        if record is None:
            raise missing(item_id)
        return read_rows([record], self.dimension).items()[0]

    def metadata_of(self, item_id: str) -> dict[str, Any] | None:
        record = self._find(item_id, ["metadata"])
        metadata: dict[str, Any] | None = None if record is None else json.loads(record["metadata"])
        return metadata

    def _find(self, item_id: str, fields: Sequence[str]) -> Record | None:
        expression = f"key in {quote_list([key_of(item_id)])}"
        records = self._connection.query(self.identity, expression, fields, ITEMS)
        return records[0] if records else None

    def search(
        self,
        queries: NDArray[np.floating],
        top: int,
        *,
        filter: object = None,  # noqa: A002 - the word of the field, as in the request
        threshold: float | None = None,
        exact: bool = False,
    ) -> SearchAnswer:
        unit = check_queries(queries, top, threshold, self.dimension)
        condition = None if filter is None else parse_filter(filter)
        milvus_filter = translate_filter(condition, key_of)
        answer = self._search_milvus(milvus_filter, unit, top, exact=exact)
        if answer is None:
            return self.state.search(
                unit, top, condition=condition, threshold=threshold, exact=exact
            )
        least = -np.inf if threshold is None else min_dot_product(threshold)
        matches = [[match for match in row if match.similarity >= least] for row in answer.matches]
        return SearchAnswer(matches, answer.exact, answer.matching)

    def _search_milvus(
        self, milvus_filter: MilvusFilter, queries: Embeddings, top: int, *, exact: bool
    ) -> SearchAnswer | None:
        """Returns the results of Milvus; None if it cannot evaluate the filter, or no effort
        reaches the recall.

        The number of matching items is cached, and counted again during the search.
        """
        undecided = self._pool.submit(self._is_undecided, milvus_filter)
        matching = self._counts.get(milvus_filter.expression)
        if matching is None:
            matching = self._count(milvus_filter.expression)
        if matching <= _SCAN_AT_MOST:
            answer = self._compare_all(milvus_filter.expression, queries, top)
        elif exact:
            answer = None
        else:
            counting = self._pool.submit(self._count, milvus_filter.expression)
            answer = self._search_index(milvus_filter.expression, queries, top, matching, counting)
        return None if undecided.result() else answer

    def _is_undecided(self, milvus_filter: MilvusFilter) -> bool:
        if not milvus_filter.undecided_tokens:
            return False
        tokens = quote_list(sorted(milvus_filter.undecided_tokens))
        expression = f"array_contains_any(tokens, {tokens})"
        return self._connection.count(self.identity, expression, ITEMS) > 0

    def _count(self, expression: str) -> int:
        """Returns how many items match the expression, and caches the number."""
        condition = "" if expression == ALL_ITEMS else expression
        counted = self._connection.count(self.identity, condition, ITEMS)
        if len(self._counts) > _CACHED_COUNTS:
            self._counts = {}
        self._counts[expression] = counted
        return counted

    def _compare_all(self, expression: str, queries: Embeddings, top: int) -> SearchAnswer | None:
        """Scans and counts all items that match; returns None if there are too many by now."""
        try:
            records = self._connection.query(
                self.identity, expression, WHOLE, ITEMS, limit=2 * _SCAN_AT_MOST
            )
        except AnswerTooLarge:
            return None
        num = len(records)
        if num == 2 * _SCAN_AT_MOST:
            self._counts.pop(expression, None)
            return None
        self._counts[expression] = num
        rows = read_rows(records, self.dimension)
        return SearchAnswer([rows.score(query)[:top] for query in queries], True, num)

    def _search_index(
        self,
        expression: str,
        queries: Embeddings,
        top: int,
        matching: int,
        counting: Future[int],
    ) -> SearchAnswer | None:
        """Searches the index. If the new count of matching items requires more effort than the
        cached count, it searches again. Returns None if no effort is known, or too few are found.
        """
        effort = self._choose_effort(min(top, matching), matching)
        if effort is None:
            return None
        matches = self._nearest(expression, queries, min(top, matching), effort)
        counted = counting.result()
        needed = self._choose_effort(min(top, counted), counted)
        if needed is None:
            return self._compare_all(expression, queries, top)
        if needed > effort:
            matches = self._nearest(expression, queries, min(top, counted), needed)
        if any(len(row) < min(top, counted) for row in matches):
            return None
        return SearchAnswer(matches, False, counted)

    def _choose_effort(self, num_answers: int, matching: int) -> int | None:
        self._facts.refresh_if_old()
        audit = self._facts.audit
        effort = audit.effort
        if effort is None and matching > MOST_ITEMS:
            effort = self._index_kind.efforts[-1]
        return choose_effort(
            effort,
            num_answers,
            matching,
            max(audit.items, matching),
            most=_UNBOUNDED,
            scan_at_most=_SCAN_AT_MOST,
        )

    def _nearest(
        self, expression: str, queries: Embeddings, num_answers: int, effort: int
    ) -> list[list[FoundItem]]:
        """Returns the nearest items of each query, as found by Milvus."""
        condition = "" if expression == ALL_ITEMS else expression
        params = self._index_kind.search_params(effort, num_answers)
        max_rows = rows_per_message(self.dimension)
        fits_whole = num_answers <= max_rows
        matches = []
        block_size = max(1, max_rows // num_answers)
        for start in range(0, len(queries), block_size):
            block = queries[start : start + block_size]
            answers = self._connection.search(
                self.identity,
                block,
                num_answers,
                condition,
                params,
                WHOLE if fits_whole else (),
                ITEMS,
            )
            for query, records in zip(block, answers, strict=True):
                whole_records = (
                    records
                    if fits_whole
                    else self._read([record["key"] for record in records], WHOLE)
                )
                matches.append(read_rows(whole_records, self.dimension).score(query))
        return matches

    def _read(self, keys: Sequence[str], fields: Sequence[str]) -> list[Record]:
        max_rows = rows_per_message(self.dimension)
        parts = read_keys(self._connection, self.identity, keys, max_rows, fields)
        return [record for part in parts for record in part]

    def items(self, num_rows: int = COPIED_ROWS) -> Iterator[list[Item]]:
        for records in self._items.iter_records():
            for part in split(records, num_rows):
                yield read_rows(part, self.dimension).items()

    def describe(self) -> Description:
        counting = self._pool.submit(len, self)
        self._facts.refresh()
        audit = self._facts.audit
        return self._describe_index(
            counting.result(),
            self._index_kind.kind,
            audit.effort,
            audit.recall,
            audit.generation,
            sorted(self._facts.fields),
        )

    def reindex(self, advance: Callable[[int], None] = lambda _: None) -> None:
        """Waits until Milvus has indexed all items, if there are enough of them, and audits the
        recall again; reads and writes continue meanwhile.
        """

        def check_and_advance(num: int) -> None:
            self._upkeep.check_wanted()
            advance(num)

        with self._indexing:
            num_items, audited = len(self), None
            if num_items >= copied_audit.LEAST_INDEXED:
                copied_audit.finish_index(self._connection, self.identity, check_and_advance)
                audited = copied_audit.audit(
                    self._items, self._index_kind, self.recall_target, check_and_advance
                )
            self._facts.refresh()
            self._facts.store_audit(self._facts.audit.after(num_items, audited))
            self._upkeep.record_success()

    def _submit(self, request: WriteRequest) -> list[Outcome]:
        outcomes = self._changes.submit(request)
        self._unchecked += len(outcomes)
        if self._background and self._unchecked >= _CHECK_ITEMS:
            self._unchecked = 0
            self._pool.submit(self._index_if_due)
        return outcomes

    def _write(self, changes: list[Change]) -> None:
        ids = [item_id for change in changes for item_id in change.request.ids]
        batch = KeyedBatch(self._connection, self._facts, self._pictures, ids)
        commit(batch, changes, self.dimension)
        self._pictures.write(new_pictures(changes))

    def read_thumbnails(self, item_ids: Sequence[str]) -> dict[str, Thumbnail]:
        return self._pictures.read(item_ids)

    def thumbnail_versions(self, item_ids: Sequence[str]) -> list[str | None]:
        version_of = self._pictures.versions(item_ids)
        return [version_of.get(item_id) for item_id in item_ids]

    def add_thumbnails(self, thumbnails: Mapping[str, Thumbnail]) -> None:
        records = self._read([key_of(item_id) for item_id in thumbnails], ["id"])
        present = {record["id"] for record in records}
        self._pictures.write(
            {item_id: picture for item_id, picture in thumbnails.items() if item_id in present}
        )

    def without_thumbnail(self) -> list[str]:
        pictured = set(self._pictures.keys())
        return [
            record["id"]
            for records in self._items.list_items(["key", "id"], _LISTED_BYTES)
            for record in records
            if record["key"] not in pictured
        ]

    def _index_if_due(self) -> None:
        """Starts an audit if the collection has grown: recall was measured at a smaller size."""
        num_items = len(self)
        self._facts.refresh()
        if (
            num_items >= copied_audit.LEAST_INDEXED
            and num_items > _AUDIT_GROWTH * self._facts.audit.items
        ):
            self._start_indexing(num_items)


def _num_items(change: Change) -> int:
    return len(change.request.ids)
