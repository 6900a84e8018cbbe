"""Measures the recall of Milvus's index.

Querying with a vector that is itself indexed overestimates recall. So the audit holds out some
items as queries, and indexes the other items in a temporary collection with the same kind of index.
Half of the queries select the lowest effort that reaches the target; the other half measure its
recall. Our own scan gives the true neighbors.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.collections.milvus.connection import MilvusConnection
from mlcd.collections.milvus.index_kinds import IndexKind
from mlcd.collections.milvus.item_records import Record, read_rows
from mlcd.collections.milvus.keyed_batch import rows_per_message, split
from mlcd.collections.milvus.schemas import AUDITED, DEFAULT, new_name
from mlcd.collections.milvus.versioned_items import VersionedItems
from mlcd.errors import StoreUnreachable
from mlcd.indexes.scan import empty_neighbors, merge_neighbors, scan
from mlcd.indexes.tuning import AUDITED_TOP, HELD_OUT_QUERIES, Recall, choose_effort
from mlcd.types import Embeddings, Neighbors

# Fewest items worth an index; with fewer, a full scan takes a few milliseconds.
LEAST_INDEXED: Final = 5000
_QUERY_BATCH: Final = 100
_POLL_S: Final = 0.5
_WAIT_S: Final = 3600.0  # longest wait for an index build; `advance` may raise to cancel earlier


def audit(
    items: VersionedItems, index_kind: IndexKind, target: float, advance: Callable[[int], None]
) -> tuple[int, Recall] | None:
    """Returns the least effort that reaches the target, and its audited recall; None if no effort
    does.
    """
    held_out, total = HELD_OUT_QUERIES, len(items)
    share = min(held_out, total // 5) / total
    advance(0)
    queries = _shuffle_vectors(items.iter_records(last=share), items.dimension)[:held_out]
    connection = items.connection
    with _temporary_collection(connection, index_kind, items.dimension) as name:
        truth, num_rows = _copy(items.iter_records(first=share), connection, name, queries, advance)
        finish_index(connection, name, advance)
        _merge(connection, name, advance)
        connection.load(name)
        return choose_effort(
            lambda part, effort: _search_copy(connection, name, index_kind, queries[part], effort),
            truth,
            target,
            num_rows,
            efforts=index_kind.efforts,
            advance=advance,
        )


def finish_index(connection: MilvusConnection, name: str, advance: Callable[[int], None]) -> None:
    """Waits until all rows are indexed, except rows in segments too small for Milvus to index."""
    connection.flush(name)
    _wait(lambda: connection.count_unindexed_rows(name) == 0, advance)


def _merge(connection: MilvusConnection, name: str, advance: Callable[[int], None]) -> None:
    """Merges the segments, as Milvus itself does in time. Each segment is searched with the same
    effort, so recall falls with fewer segments: 0.975 before merging, 0.944 after, at 100,000
    items.
    """
    job = connection.merge(name)
    _wait(lambda: connection.is_merged(job), advance)
    _wait(lambda: connection.count_unindexed_rows(name) == 0, advance)


def _wait(done: Callable[[], bool], advance: Callable[[int], None]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not done() and time.monotonic() < deadline:
        advance(0)
        time.sleep(_POLL_S)


@contextmanager
def _temporary_collection(
    connection: MilvusConnection, index_kind: IndexKind, dimension: int
) -> Iterator[str]:
    """Yields the name of an empty collection, which is dropped at the end of the block."""
    name = new_name("audit")
    connection.make(name, AUDITED, index_kind, dimension)
    try:
        yield name
    finally:
        with suppress(StoreUnreachable):  # the collection is left behind and takes disk space
            connection.drop(name)


def _shuffle_vectors(blocks: Iterator[list[Record]], dimension: int) -> Embeddings:
    """Returns the vectors of the records in random order, [n, D]."""
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
    """Copies the vectors into the collection, and scans them; returns the true neighbors of the
    queries and the number of copied vectors.
    """
    best, num_rows = empty_neighbors(len(queries), AUDITED_TOP), 0
    max_rows = rows_per_message(queries.shape[1])
    for records in blocks:
        for part in split(records, max_rows):
            vectors = read_rows(part, queries.shape[1]).vectors
            rows = [{"row": row, "vector": vector} for row, vector in enumerate(vectors, num_rows)]
            connection.insert(name, rows)
            neighbors = scan(queries, vectors, AUDITED_TOP)
            ids = np.where(neighbors.ids >= 0, neighbors.ids + num_rows, -1)
            best = merge_neighbors(best, Neighbors(ids, neighbors.scores), AUDITED_TOP)
            num_rows += len(part)
            advance(len(part))
    return best, num_rows


def _search_copy(
    connection: MilvusConnection, name: str, index_kind: IndexKind, queries: Embeddings, effort: int
) -> Neighbors:
    """Searches the copy's index and rescores the results in float32. The returned ids are only
    ranks, because recall is measured by score.
    """
    neighbors = empty_neighbors(len(queries), AUDITED_TOP)
    params = index_kind.search_params(effort, AUDITED_TOP)
    for start in range(0, len(queries), _QUERY_BATCH):
        block = queries[start : start + _QUERY_BATCH]
        answers = connection.search(name, block, AUDITED_TOP, "", params, ("vector",), DEFAULT)
        for index, answer in enumerate(answers, start):
            for rank, record in enumerate(answer):
                neighbors.ids[index, rank] = rank
                neighbors.scores[index, rank] = (
                    np.asarray(record["vector"], dtype=np.float32) @ queries[index]
                )
    return neighbors
