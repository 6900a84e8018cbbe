"""Builds the index of a collection in Postgres, and measures its recall.

Postgres keeps the graph up to date, but does not promise a recall. Querying with a vector that is
itself indexed overestimates recall (0.9999 instead of 0.85 at the same effort, on 20,000 items). So
the audit holds out some items as queries, and indexes the other items in a temporary table. Half of
the queries select the lowest effort (`hnsw.ef_search`) that reaches the target; the other half
measure its recall. Our own scan gives the true neighbors.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pgvector import Vector
from psycopg import sql

from mlcd.collections.postgres.items_table import ItemsTable
from mlcd.collections.postgres.reused_connections import Connection
from mlcd.errors import Conflict
from mlcd.indexes.scan import empty_neighbors, merge_neighbors, scan
from mlcd.indexes.tuning import (
    AUDITED_TOP,
    HELD_OUT_QUERIES,
    Recall,
    choose_effort,
    graph_efforts,
)
from mlcd.types import Embeddings, Neighbors

# Fewest items worth an index; with fewer, a full scan takes a few milliseconds.
LEAST_INDEXED: Final = 5000
# limits of pgvector
MOST_EFFORT: Final = 1000
MOST_DIMENSIONS: Final = 2000
_MEMORY: Final = "512MB"  # for an index build; a larger graph is built on disk
_READ_ROWS: Final = 2000
_GRAPH: Final = sql.SQL(
    "CREATE INDEX {index} ON {table} USING hnsw (vector vector_ip_ops)"
    " WITH (m = 16, ef_construction = 128)"
)
_SET_EFFORT: Final = "SELECT set_config('hnsw.ef_search', %s, true)"


def index_name(table: ItemsTable) -> str:
    return f"items_{table.number}_graph"


def make_index(connection: Connection, table: ItemsTable) -> None:
    """Builds or rebuilds the graph; searches and writes continue meanwhile.

    Raises Conflict if another server is building it.
    """
    lock = ("mlcd", table.number)
    is_locked = connection.execute(
        "SELECT pg_try_advisory_lock(hashtext(%s), %s::integer)", lock
    ).fetchone()
    if is_locked != (True,):
        raise Conflict(
            "another server is building this index",
            remedy="wait; the collection's `index` shows when it is ready",
        )
    try:
        connection.execute("SELECT set_config('maintenance_work_mem', %s, false)", (_MEMORY,))
        if _is_valid(connection, table):
            _drop(connection, f"{index_name(table)}_ccnew")  # left by a killed server
            index_identifier = sql.Identifier("mlcd", index_name(table))
            connection.execute(sql.SQL("REINDEX INDEX CONCURRENTLY {}").format(index_identifier))
            return
        drop_index(connection, table)
        index = sql.SQL("CONCURRENTLY {}").format(sql.Identifier(index_name(table)))
        connection.execute(_GRAPH.format(index=index, table=table.name))
    finally:
        connection.execute("SELECT pg_advisory_unlock(hashtext(%s), %s::integer)", lock)


def drop_index(connection: Connection, table: ItemsTable) -> None:
    """Removes the graph if there is one."""
    _drop(connection, index_name(table))


def _drop(connection: Connection, name: str) -> None:
    index = sql.Identifier("mlcd", name)
    connection.execute(sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS {}").format(index))


def _is_valid(connection: Connection, table: ItemsTable) -> bool:
    query = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)"
    return connection.execute(query, (f"mlcd.{index_name(table)}",)).fetchone() == (True,)


def audit(
    connection: Connection, table: ItemsTable, target: float, advance: Callable[[int], None]
) -> tuple[int, Recall] | None:
    """Returns the least effort that reaches the target, and its audited recall; None if no effort
    does.
    """
    rows = table.row_numbers(connection)
    num = min(HELD_OUT_QUERIES, len(rows) // 5)
    held_out = np.random.default_rng(0).choice(rows, num, replace=False)
    queries = _read_held_out(connection, table, held_out)
    try:
        advance(0)
        _make_copy(connection, table, held_out)
        advance(0)
        truth, num_rows = _scan_copy(connection, queries, table.dimension, advance)
        return choose_effort(
            lambda part, effort: _search_copy(connection, queries[part], effort),
            truth,
            target,
            num_rows,
            efforts=[min(effort, MOST_EFFORT) for effort in graph_efforts()],
            advance=advance,
        )
    finally:
        if not connection.closed:
            connection.execute("DROP TABLE IF EXISTS pg_temp.audited")


def _read_held_out(
    connection: Connection, table: ItemsTable, held_out: NDArray[np.int64]
) -> Embeddings:
    """Returns the vectors of the held-out rows in random order, without rows deleted meanwhile."""
    query = table.statement(sql.SQL("SELECT vector FROM {table} WHERE row = ANY(%s)"))
    with connection.cursor(binary=True) as cursor:
        rows = cursor.execute(query, [held_out.tolist()]).fetchall()
    vectors = _stack([vector for (vector,) in rows], table.dimension)
    order: NDArray[np.int64] = np.random.default_rng(1).permutation(len(vectors))
    return vectors[order]


def _make_copy(connection: Connection, table: ItemsTable, held_out: NDArray[np.int64]) -> None:
    """Creates a temporary table of all other vectors, with a graph like the collection's."""
    connection.execute("DROP TABLE IF EXISTS pg_temp.audited")
    connection.execute(
        table.statement(
            sql.SQL(
                "CREATE TEMP TABLE audited AS SELECT row, vector FROM {table}"
                " WHERE NOT row = ANY(%s)"
            )
        ),
        [held_out.tolist()],
    )
    connection.execute(_GRAPH.format(index=sql.SQL(""), table=sql.SQL("audited")))
    connection.execute("ANALYZE audited")


def _scan_copy(
    connection: Connection, queries: Embeddings, dimension: int, advance: Callable[[int], None]
) -> tuple[Neighbors, int]:
    """Returns the true neighbors of the queries in the copy, by a scan, and its number of rows."""
    best, num_rows = empty_neighbors(len(queries), AUDITED_TOP), 0
    with connection.transaction(), connection.cursor("audited", binary=True) as cursor:
        cursor.execute("SELECT row, vector FROM audited")
        while rows_read := cursor.fetchmany(_READ_ROWS):
            rows = np.array([row for row, _ in rows_read], dtype=np.int64)
            neighbors = scan(
                queries, _stack([vector for _, vector in rows_read], dimension), AUDITED_TOP
            )
            ids = np.where(neighbors.ids >= 0, rows[neighbors.ids], -1)
            best = merge_neighbors(best, Neighbors(ids, neighbors.scores), AUDITED_TOP)
            num_rows += len(rows)
            advance(len(rows))
    return best, num_rows


def _search_copy(connection: Connection, queries: Embeddings, effort: int) -> Neighbors:
    """Searches the copy's graph, and rescores the results in float32."""
    neighbors = empty_neighbors(len(queries), AUDITED_TOP)
    with connection.transaction(), connection.cursor(binary=True) as cursor:
        cursor.execute("SELECT set_config('enable_seqscan', 'off', true)")
        cursor.execute(_SET_EFFORT, (str(effort),))
        for index, query in enumerate(queries):
            statement = "SELECT row, vector FROM audited ORDER BY vector <#> %b LIMIT %s"
            rows = cursor.execute(statement, [Vector(query), AUDITED_TOP]).fetchall()
            for rank, (row, vector) in enumerate(rows):
                neighbors.ids[index, rank] = row
                neighbors.scores[index, rank] = vector.to_numpy() @ query
    return neighbors


def _stack(vectors: Sequence[Vector], dimension: int) -> Embeddings:
    if not vectors:
        return np.empty((0, dimension), dtype=np.float32)
    return np.stack([vector.to_numpy() for vector in vectors])


def set_effort(connection: Connection, effort: int | None) -> None:
    """Sets the effort of the searches in this transaction; None scans all items."""
    if effort is None:
        connection.execute("SELECT set_config('enable_indexscan', 'off', true)")
    else:
        connection.execute(_SET_EFFORT, (str(effort),))
