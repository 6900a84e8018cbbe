"""The recall of Milvus's index, as we measure it.

An item that is in an index is found far more easily than an image that is not. So the audit makes a
collection of its own, of all items but those that it asks for, with an index of the same kind. Half
of these choose the least effort that reaches the target, and the other half audit it; the truth is
our own scan.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.collections.milvus.connection import MilvusConnection
from mlcd.collections.milvus.graph_kinds import Graph
from mlcd.collections.milvus.item_records import Record, read_rows
from mlcd.collections.milvus.keyed_batch import in_parts, rows_at_once
from mlcd.collections.milvus.schemas import AUDITED, DEFAULT, new_name
from mlcd.collections.milvus.versioned_items import VersionedItems
from mlcd.errors import StoreUnreachable
from mlcd.indexes.scan import empty_neighbors, merge_neighbors, scan
from mlcd.indexes.tuning import AUDITED_TOP, HELD_OUT_QUERIES, Recall, choose_effort
from mlcd.types import Embeddings, Neighbors

# items; below, a comparison with all takes a few milliseconds
LEAST_INDEXED: Final = 5000
_QUERIES_AT_ONCE: Final = 100
_POLL_S: Final = 0.5
_WAIT_S: Final = 3600.0  # for an index; `advance` may end it sooner


def audit(
    items: VersionedItems, graph: Graph, target: float, advance: Callable[[int], None]
) -> tuple[int, Recall] | None:
    """Returns the least effort that reaches the target, and its audited recall; None where none
    does.
    """
    held_out, total = HELD_OUT_QUERIES, len(items)
    share = min(held_out, total // 5) / total
    advance(0)
    queries = _vectors(items.whole(last=share), items.dimension)[:held_out]
    connection = items.connection
    with _make_copy(connection, graph, items.dimension) as name:
        truth, num_rows = _copy(items.whole(first=share), connection, name, queries, advance)
        finish_index(connection, name, advance)
        _merge(connection, name, advance)
        connection.load(name)
        return choose_effort(
            lambda part, effort: _search_copy(connection, name, graph, queries[part], effort),
            truth,
            target,
            num_rows,
            efforts=graph.efforts,
            advance=advance,
        )


def finish_index(connection: MilvusConnection, name: str, advance: Callable[[int], None]) -> None:
    """Waits until all rows are in an index, as far as Milvus indexes segments of their size."""
    connection.flush(name)
    _wait(lambda: connection.count_unindexed_rows(name) == 0, advance)


def _merge(connection: MilvusConnection, name: str, advance: Callable[[int], None]) -> None:
    """Merges the segments, as Milvus does sooner or later: each is searched with the same effort,
    so that few find less than many (0.944 of 100,000 items where an audit of more segments had
    found 0.975).
    """
    job = connection.merge(name)
    _wait(lambda: connection.is_merged(job), advance)
    _wait(lambda: connection.count_unindexed_rows(name) == 0, advance)


def _wait(done: Callable[[], bool], advance: Callable[[int], None]) -> None:
    until = time.monotonic() + _WAIT_S
    while not done() and time.monotonic() < until:
        advance(0)
        time.sleep(_POLL_S)


@contextmanager
def _make_copy(connection: MilvusConnection, graph: Graph, dimension: int) -> Iterator[str]:
    name = new_name("audit")
    connection.make(name, AUDITED, graph, dimension)
    try:
        yield name
    finally:
        with suppress(StoreUnreachable):  # it is away: the copy stays, and costs its place
            connection.drop(name)


def _vectors(blocks: Iterator[list[Record]], dimension: int) -> Embeddings:
    """Returns the vectors of the records, in a random order."""
    parts = [read_rows(records, dimension).vectors for records in blocks]
    vectors = np.concatenate(parts) if parts else np.empty((0, dimension), dtype=np.float32)
    order: NDArray[np.int64] = np.random.default_rng(1).permutation(len(vectors))
    return vectors[order]


def _copy(
    blocks: Iterator[list[Record]],
    connection: MilvusConnection,
    name: str,
    queries: Embeddings,
    advance: Callable[[int], None],
) -> tuple[Neighbors, int]:
    """Copies the vectors, and compares the queries with all of them; returns their true neighbors
    and how many were copied.
    """
    best, num_rows = empty_neighbors(len(queries), AUDITED_TOP), 0
    at_once = rows_at_once(queries.shape[1])
    for records in blocks:
        for part in in_parts(records, at_once):
            vectors = read_rows(part, queries.shape[1]).vectors
            numbers = range(num_rows, num_rows + len(part))
            rows = [
                {"row": row, "vector": vector} for row, vector in zip(numbers, vectors, strict=True)
            ]
            connection.insert(name, rows)
            neighbors = scan(queries, vectors, AUDITED_TOP)
            ids = np.where(neighbors.ids >= 0, neighbors.ids + num_rows, -1)
            best = merge_neighbors(best, Neighbors(ids, neighbors.scores), AUDITED_TOP)
            num_rows += len(part)
            advance(len(part))
    return best, num_rows


def _search_copy(
    connection: MilvusConnection, name: str, graph: Graph, queries: Embeddings, effort: int
) -> Neighbors:
    """Searches the copy's index, and scores what it finds as a search does."""
    neighbors = empty_neighbors(len(queries), AUDITED_TOP)
    params = graph.search_params(effort, AUDITED_TOP)
    for start in range(0, len(queries), _QUERIES_AT_ONCE):
        block = queries[start : start + _QUERIES_AT_ONCE]
        answers = connection.search(name, block, AUDITED_TOP, "", params, ("vector",), DEFAULT)
        for index, answer in enumerate(answers, start):
            for place, record in enumerate(answer):
                neighbors.ids[index, place] = place
                neighbors.scores[index, place] = (
                    np.asarray(record["vector"], dtype=np.float32) @ queries[index]
                )
    return neighbors
