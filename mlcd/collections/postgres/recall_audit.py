"""The index of a collection in Postgres, and its recall as we measure it.

Postgres keeps the graph up to date by itself. What it promises nothing about is recall. An item
that is in a graph is found far more easily than an image that is not (0.9999 against 0.85 at one
effort, of 20,000 items), so the audit makes a graph of its own, of all items but those that it asks
for. Half of these choose the least effort (`hnsw.ef_search`) that reaches the target, and the other
half audit it; the truth is our own scan.
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

# items; below, a comparison with all takes a few milliseconds
LEAST_INDEXED: Final = 5000
# of pgvector
MOST_EFFORT: Final = 1000
MOST_DIMENSIONS: Final = 2000
_MEMORY: Final = "512MB"  # of an index that is being made; a larger graph is made on the disk
_READ_ROWS: Final = 2000
_GRAPH: Final = sql.SQL(
    "CREATE INDEX {index} ON {table} USING hnsw (vector vector_ip_ops)"
    " WITH (m = 16, ef_construction = 128)"
)
_SETTING: Final = "SELECT set_config('hnsw.ef_search', %s, true)"


def index_name(table: ItemsTable) -> str:
    return f"items_{table.number}_graph"


def make_index(connection: Connection, table: ItemsTable) -> None:
    """Makes the graph, or makes it again; searches and writes go on meanwhile.

    Raises Conflict where another server is at it.
    """
    lock = ("mlcd", table.number)
    lock_result = connection.execute(
        "SELECT pg_try_advisory_lock(hashtext(%s), %s::integer)", lock
    ).fetchone()
    if lock_result != (True,):
        raise Conflict(
            "another server is making this index", remedy="wait; `index` says when it is there"
        )
    try:
        connection.execute("SELECT set_config('maintenance_work_mem', %s, false)", (_MEMORY,))
        if _is_valid(connection, table):
            _drop(connection, f"{index_name(table)}_ccnew")  # what a killed server left
            index_identifier = sql.Identifier("mlcd", index_name(table))
            connection.execute(sql.SQL("REINDEX INDEX CONCURRENTLY {}").format(index_identifier))
            return
        drop_index(connection, table)
        index = sql.SQL("CONCURRENTLY {}").format(sql.Identifier(index_name(table)))
        connection.execute(_GRAPH.format(index=index, table=table.name))
    finally:
        connection.execute("SELECT pg_advisory_unlock(hashtext(%s), %s::integer)", lock)


def drop_index(connection: Connection, table: ItemsTable) -> None:
    """Removes the graph where there is one."""
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
    """Returns the least effort that reaches the target, and its audited recall; None where none
    does.
    """
    rows = table.row_numbers(connection)
    num = min(HELD_OUT_QUERIES, len(rows) // 5)
    chosen = np.random.default_rng(0).choice(rows, num, replace=False)
    queries = _read_held_out(connection, table, chosen)
    try:
        advance(0)
        _make_copy(connection, table, chosen)
        advance(0)
        truth, num_rows = _truth(connection, queries, table.dimension, advance)
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
    connection: Connection, table: ItemsTable, chosen: NDArray[np.int64]
) -> Embeddings:
    """Returns the vectors of these rows, in a random order; deleted ones are left out."""
    query = table.statement(sql.SQL("SELECT vector FROM {table} WHERE row = ANY(%s)"))
    with connection.cursor(binary=True) as cursor:
        rows = cursor.execute(query, [chosen.tolist()]).fetchall()
    vectors = _stack([vector for (vector,) in rows], table.dimension)
    order: NDArray[np.int64] = np.random.default_rng(1).permutation(len(vectors))
    return vectors[order]


def _make_copy(connection: Connection, table: ItemsTable, held_out: NDArray[np.int64]) -> None:
    """Makes a table of this session of all other vectors, with a graph like the collection's."""
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


def _truth(
    connection: Connection, queries: Embeddings, dimension: int, advance: Callable[[int], None]
) -> tuple[Neighbors, int]:
    """Compares the queries with all vectors of the copy; returns how many these are, too."""
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
    """Searches the copy's graph, and scores what it finds as a search does."""
    neighbors = empty_neighbors(len(queries), AUDITED_TOP)
    with connection.transaction(), connection.cursor(binary=True) as cursor:
        cursor.execute("SELECT set_config('enable_seqscan', 'off', true)")
        cursor.execute(_SETTING, (str(effort),))
        for index, query in enumerate(queries):
            statement = "SELECT row, vector FROM audited ORDER BY vector <#> %b LIMIT %s"
            answered = cursor.execute(statement, [Vector(query), AUDITED_TOP]).fetchall()
            for place, (row, vector) in enumerate(answered):
                neighbors.ids[index, place] = row
                neighbors.scores[index, place] = vector.to_numpy() @ query
    return neighbors


def _stack(vectors: Sequence[Vector], dimension: int) -> Embeddings:
    if not vectors:
        return np.empty((0, dimension), dtype=np.float32)
    return np.stack([vector.to_numpy() for vector in vectors])


def set_effort(connection: Connection, effort: int | None) -> None:
    """Sets how far the searches of this transaction look; None compares everything."""
    if effort is None:
        connection.execute("SELECT set_config('enable_indexscan', 'off', true)")
    else:
        connection.execute(_SETTING, (str(effort),))
