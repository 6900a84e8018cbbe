"""A collection in Postgres: many servers can write and search it at the same time.

Each change is one transaction, and writers of one collection are serialized. A search sees one
snapshot, and results of Postgres are rescored in float32.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pgvector import Vector
from psycopg import sql

from mlcd.collections.changes import Effect, Outcome, WriteRequest, missing
from mlcd.collections.filters import parse_filter
from mlcd.collections.item import FoundItem, Item, check_id
from mlcd.collections.memory_state import IN_MEMORY, Difference, check_fits
from mlcd.collections.port import Description, Promises
from mlcd.collections.postgres import recall_audit
from mlcd.collections.postgres.database import Database
from mlcd.collections.postgres.items_table import ItemsTable, WrittenBatch
from mlcd.collections.postgres.pinned_facts import Facts, read_facts
from mlcd.collections.postgres.reused_connections import Connection
from mlcd.collections.postgres.sql_filters import Where, where
from mlcd.collections.remote_collection import COPIED_ROWS, RemoteCollection, choose_effort
from mlcd.collections.search_checks import check_queries
from mlcd.collections.searcher import SearchAnswer, Searcher
from mlcd.images.thumbnail import Thumbnail
from mlcd.indexes.tuning import Recall
from mlcd.types import Embeddings, min_dot_product

_CONSISTENCY: Final = (
    "a search sees every change that any server acknowledged before it began (Postgres"
    " transactions, synchronous commit)"
)
_CANNOT: Final = (
    "thumbnails are not bounded as a whole, and equal pictures are stored once per item",
    IN_MEMORY,
    "metadata cannot have U+0000 or halves of surrogate pairs",
    "recall is audited on a second graph of nearly all items, not on the graph that is searched",
)
_NO_INDEX: Final = (
    f"above {recall_audit.MOST_DIMENSIONS:,} dimensions there is no index: every search scans all"
    " items"
)
_SCAN_AT_MOST: Final = 2000  # matching items, up to which all of them are compared
_CACHED_COUNTS: Final = 128
_AUDIT_GROWTH: Final = 2  # recall is measured again at this multiple of the indexed items


@dataclass(frozen=True)
class _ChangedRows:
    """The items of a collection's table that changed, by revision."""

    database: Database
    table: ItemsTable

    @contextmanager
    def changes(self, earlier: Searcher, mark: int | None) -> Iterator[Difference | None]:
        """Yields the changes since the revision `mark`, from one snapshot; see `ChangingItems`."""
        with self.database.reading() as connection:
            facts = read_facts(connection, self.table.number)
            if facts.revision == mark:
                yield None
                return
            check_fits(facts.items, "Postgres")
            above = -1 if mark is None else mark
            yield Difference(self._effects(connection, earlier, above), facts.revision)

    def _effects(self, connection: Connection, earlier: Searcher, above: int) -> Iterator[Effect]:
        row_numbers = self.table.row_numbers(connection)
        alive = np.flatnonzero(earlier.alive)
        for position in alive[~np.isin(earlier.rows[alive], row_numbers)].tolist():
            yield Effect(earlier.ids[position])
        for block in self.table.blocks(connection, above=above):
            for item_id, row, vector, metadata in zip(
                block.ids, block.rows.tolist(), block.vectors, block.metadata, strict=True
            ):
                yield Effect(item_id, row, vector, metadata)


class PostgresCollection(RemoteCollection):
    """A collection in Postgres."""

    def __init__(
        self, database: Database, facts: Facts, *, background: bool, loses: str | None = None
    ) -> None:
        """loses: the server's setting by which acknowledged writes can be lost, such as "fsync is
        off"; None if there is none.
        """
        table = ItemsTable(facts.number, facts.dimension)
        not_durable = (
            () if loses is None else (f"acknowledged writes survive a power cut: {loses}",)
        )
        not_indexed = () if facts.dimension <= recall_audit.MOST_DIMENSIONS else (_NO_INDEX,)
        super().__init__(
            facts.name,
            facts.fingerprint,
            facts.dimension,
            facts.recall,
            Promises("postgresql", "many", _CONSISTENCY, (*_CANNOT, *not_indexed, *not_durable)),
            _ChangedRows(database, table),
        )
        self.number = facts.number
        self._database, self._table = database, table
        self._background = background and facts.dimension <= recall_audit.MOST_DIMENSIONS
        self._counts: dict[tuple[int, str], int] = {}

    def __len__(self) -> int:
        return self._facts().items

    def get(self, item_id: str) -> Item:
        with self._database.connect() as connection:
            query = self._table.statement(
                sql.SQL("SELECT row, id, metadata, vector FROM {table} WHERE id = %s")
            )
            with connection.cursor(binary=True) as cursor:
                rows = cursor.execute(query, [check_id(item_id)]).fetchall()
        if not rows:
            raise missing(item_id)
        fetched = self._table.read_rows(rows)
        return Item(item_id, fetched.vectors[0], json.loads(fetched.metadata[0]))

    def metadata_of(self, item_id: str) -> dict[str, Any] | None:
        query = self._table.statement(sql.SQL("SELECT metadata FROM {table} WHERE id = %s"))
        with self._database.connect() as connection:
            row = connection.execute(query, [item_id]).fetchone()
        metadata: dict[str, Any] | None = None if row is None else json.loads(row[0])
        return metadata

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
        least = -np.inf if threshold is None else min_dot_product(threshold)
        with self._database.searching() as connection:
            facts = read_facts(connection, self.number)
            clause = where(condition)
            matching = facts.items if condition is None else self._count(connection, facts, clause)
            num_answers = min(top, matching)
            if num_answers == 0 or not len(unit):
                return SearchAnswer([[] for _ in unit], True, matching)
            effort = (
                None
                if exact
                else choose_effort(
                    facts.effort,
                    num_answers,
                    matching,
                    facts.items,
                    most=recall_audit.MOST_EFFORT,
                    scan_at_most=_SCAN_AT_MOST,
                )
            )
            answers = self._nearest(connection, unit, clause, num_answers, effort)
            incomplete = [
                index for index, answer in enumerate(answers) if len(answer) < num_answers
            ]
            exact_answers = (
                self._nearest(connection, unit[incomplete], clause, num_answers, None)
                if incomplete
                else []
            )
            for index, answer in zip(incomplete, exact_answers, strict=True):
                answers[index] = answer
        matches = [[match for match in answer if match.similarity >= least] for answer in answers]
        return SearchAnswer(matches, effort is None, matching)

    def _count(self, connection: Connection, facts: Facts, clause: Where) -> int:
        """Returns how many items match the filter; cached for each revision."""
        key = (facts.revision, repr((clause.condition, clause.parameters)))
        counted = self._counts.get(key)
        if counted is None:
            query = self._table.statement(
                sql.SQL("SELECT count(*) FROM {table} WHERE {where}"), where=clause.condition
            )
            (counted,) = connection.execute(query, clause.parameters).fetchone() or (0,)
            self._counts[key] = counted
            if len(self._counts) > _CACHED_COUNTS:  # mostly counts of old revisions
                self._counts = {}
        return counted

    def _nearest(
        self,
        connection: Connection,
        queries: Embeddings,
        clause: Where,
        num_answers: int,
        effort: int | None,
    ) -> list[list[FoundItem]]:
        """Returns the nearest items of each query. effort: None scans all items."""
        recall_audit.set_effort(connection, effort)
        statement = self._table.statement(
            sql.SQL(
                "SELECT row, id, metadata, vector FROM {table} WHERE {where}"
                " ORDER BY vector <#> %b LIMIT %s"
            ),
            where=clause.condition,
        )
        cursors = [connection.cursor(binary=True) for _ in queries]
        for cursor, query in zip(cursors, queries, strict=True):  # pipelined: sent before any read
            cursor.execute(statement, [*clause.parameters, Vector(query), num_answers])
        return [
            self._table.read_rows(cursor.fetchall()).score(query)
            for cursor, query in zip(cursors, queries, strict=True)
        ]

    def items(self, num_rows: int = COPIED_ROWS) -> Iterator[list[Item]]:
        with self._database.reading() as connection:
            for block in self._table.blocks(connection, num_rows):
                yield block.items()

    def describe(self) -> Description:
        facts = self._facts()
        return self._describe_index(
            facts.items, "hnsw", facts.effort, facts.audit, facts.generation, facts.fields
        )

    def reindex(self, advance: Callable[[int], None] = lambda _: None) -> None:
        """Rebuilds and audits the index if there are enough items; reads and writes continue
        meanwhile.
        """

        def check_and_advance(num: int) -> None:
            self._upkeep.check_wanted()
            advance(num)

        with self._indexing:
            num_items, audited = self._facts().items, None
            if self._takes_index(num_items):
                check_and_advance(0)
                with self._database.connect() as connection:
                    recall_audit.make_index(connection, self._table)
                    audited = recall_audit.audit(
                        connection, self._table, self.recall_target, check_and_advance
                    )
            if audited is None:  # an index below the target recall is not used
                with self._database.connect() as connection:
                    recall_audit.drop_index(connection, self._table)
            self._store_audit(num_items, audited)
            self._upkeep.record_success()

    def _store_audit(self, num_items: int, audited: tuple[int, Recall] | None) -> None:
        """Stores the effort and the recall for the searches of all servers."""
        query = self._table.statement(
            sql.SQL(
                "UPDATE mlcd.collections SET effort = %s, audit = %s::jsonb, indexed_items = %s,"
                " generation = generation + 1, revision = revision + 1, fields = (SELECT"
                " coalesce(array_agg(DISTINCT name), '{{}}') FROM {table},"
                " jsonb_object_keys(facets) AS name) WHERE number = %s"
            )
        )
        effort, audit = (audited[0], json.dumps(asdict(audited[1]))) if audited else (None, None)
        with self._database.writing() as connection:
            read_facts(connection, self.number, to_write=True)
            connection.execute(query, [effort, audit, num_items, self.number])

    def _submit(self, request: WriteRequest) -> list[Outcome]:
        with self._database.writing() as connection:
            facts = read_facts(connection, self.number, to_write=True)
            batch = WrittenBatch(
                connection, self._table, facts.next_row, facts.revision + 1, request.thumbnails
            )
            batch.look_up(request.ids)
            outcomes, effects = request.apply(batch, self.dimension)
            batch.write()
            if effects:
                connection.execute(
                    "UPDATE mlcd.collections SET items = items + %s, next_row = %s, revision = %s,"
                    " fields = %s WHERE number = %s",
                    [
                        batch.num_added,
                        batch.next_row,
                        batch.revision,
                        sorted(batch.fields.union(facts.fields)),
                        self.number,
                    ],
                )
        self._index_if_due(facts)
        return outcomes

    def read_thumbnails(self, item_ids: Sequence[str]) -> dict[str, Thumbnail]:
        with self._database.connect() as connection:
            return dict(self._table.read_thumbnails(connection, item_ids))

    def thumbnail_versions(self, item_ids: Sequence[str]) -> list[str | None]:
        with self._database.connect() as connection:
            version_of = self._table.thumbnail_versions(connection, item_ids)
        return [version_of.get(item_id) for item_id in item_ids]

    def add_thumbnails(self, thumbnails: Mapping[str, Thumbnail]) -> None:
        with self._database.writing() as connection:
            self._table.show(connection, thumbnails)

    def without_thumbnail(self) -> list[str]:
        with self._database.connect() as connection:
            return self._table.without_thumbnail(connection)

    def _index_if_due(self, facts: Facts) -> None:
        """Starts an audit if the collection has grown: recall was measured at a smaller size."""
        if (
            self._background
            and self._takes_index(facts.items)
            and facts.items > _AUDIT_GROWTH * facts.indexed_items
        ):
            self._start_indexing(facts.items)

    def _takes_index(self, num_items: int) -> bool:
        return (
            self.dimension <= recall_audit.MOST_DIMENSIONS
            and num_items >= recall_audit.LEAST_INDEXED
        )

    def _facts(self) -> Facts:
        with self._database.connect() as connection:
            return read_facts(connection, self.number)
