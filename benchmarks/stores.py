"""Every store of collections side by side with bare faiss: the same items, queries and target.

    python benchmarks/stores.py [--items 100000] [--dimension 512] [--recall 0.95]
        [--without-folder] [--made] [--milvus-data FOLDER] [URL …]

URL: postgresql://HOST/DATABASE or milvus://HOST:PORT, beside a folder; what the collection
`benchmark` has there is deleted. FOLDER: that of the Milvus server, whose growth is what it takes
on the disk, its log included. It prints durable adds per second, the time to make and audit the
index, recall@10 against a comparison with everything, p50 and p99 of single queries from 1 and from
8 clients, the same with filters that leave 1, 10 and 50 %, and the bytes on the disk. The data are
those of
`benchmarks/search.py`. --made searches what an earlier run put into the stores behind URLs, so that
only the searches need a quiet machine.
"""

import argparse
import contextlib
import functools
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import faiss
import numpy as np

from benchmarks.search import ADDED_AT_ONCE, NUM_QUERIES, SHARES, TOP, Surface
from mlcd.collections.item import Item
from mlcd.collections.places import open_place
from mlcd.collections.port import CollectionPort
from mlcd.collections.store_urls import describe_store, is_store, kind_of
from mlcd.indexes.scan import scan
from mlcd.indexes.tuning import measure
from mlcd.types import Embeddings, Neighbors

NAME: Final = "benchmark"
FINGERPRINT: Final = "0" * 64
CLIENTS: Final = (1, 8)
LINKS: Final = 32  # those of the collection's own graph


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("urls", nargs="*")
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--recall", type=float, default=0.95)
    parser.add_argument("--without-folder", action="store_true")
    parser.add_argument("--made", action="store_true")
    parser.add_argument("--milvus-data", type=Path)
    options = parser.parse_args()
    data = Surface(options.dimension)
    rows, queries = data.draw(options.items), data.draw(NUM_QUERIES)
    truth = scan(queries, rows, TOP)
    with tempfile.TemporaryDirectory() as folder:
        effort = None
        first = () if options.without_folder else (str(Path(folder) / "collections"),)
        for place in (*first, *options.urls):
            size = functools.partial(disk_bytes, place, options.milvus_data)
            if options.made and is_store(place):
                found = search_made(place, queries, truth)
            else:
                found = show_store(place, rows, queries, truth, options.recall, size)
            effort = effort or found
    show_faiss(rows, queries, truth, effort or LINKS)


def show_store(
    place: str,
    rows: Embeddings,
    queries: Embeddings,
    truth: Neighbors,
    recall: float,
    size: Callable[[], int],
) -> int | None:
    """Prints the figures of one store, and returns the effort of its index."""
    print(f"== {describe_store(place) if is_store(place) else 'folder'}", flush=True)
    before = size()
    with contextlib.closing(open_place(place)) as store:
        if store.find(NAME) is not None:
            store.delete(NAME)
        collection, _ = store.create(
            NAME, fingerprint=FINGERPRINT, dimension=rows.shape[1], recall=recall
        )
        started = time.perf_counter()
        for start in range(0, len(rows), ADDED_AT_ONCE):
            collection.add(
                [
                    Item(f"item-{n}", row, {"n": n % 100})
                    for n, row in enumerate(rows[start : start + ADDED_AT_ONCE], start)
                ]
            )
        taken = time.perf_counter() - started
        print(f"durable adds, {ADDED_AT_ONCE} at once: {len(rows) / taken:,.0f} items/s")
        show_index(collection)
        show_searches(collection, queries, truth)
        print(f"disk: {(size() - before) / len(rows):,.0f} bytes an item", flush=True)
        return collection.describe().effort


def search_made(place: str, queries: Embeddings, truth: Neighbors) -> int | None:
    """Prints the figures of searches in what is there, and returns the effort of its index."""
    print(f"== {describe_store(place)}, made before", flush=True)
    with contextlib.closing(open_place(place)) as store:
        collection = store.get(NAME)
        print(f"index: {collection.describe()}", flush=True)
        show_searches(collection, queries, truth)
        return collection.describe().effort


def show_searches(collection: CollectionPort, queries: Embeddings, truth: Neighbors) -> None:
    found = scores_of(collection, queries)
    print(f"recall@{TOP}: {measure(found, truth, 0, len(collection)).measured:.4f}")
    show_times("all items", lambda query: collection.search(query, TOP), queries)
    for share in SHARES:
        chosen = {"field": "n", "lt": share}
        show_times(
            f"{share} % of them",
            lambda query, chosen=chosen: collection.search(query, TOP, filter=chosen),
            queries,
        )


def show_index(collection: CollectionPort) -> None:
    started = time.perf_counter()
    collection.reindex()
    described, taken = collection.describe(), time.perf_counter() - started
    print(f"index: {described.kind}, effort {described.effort}, made and audited in {taken:.0f} s")
    print(f"audit: {described.recall}", flush=True)


def scores_of(collection: CollectionPort, queries: Embeddings) -> Neighbors:
    """Returns the similarities that the collection finds, [Q, TOP]."""
    found = collection.search(queries, TOP)
    scores = np.array(
        [[match.similarity for match in matches] for matches in found.matches], np.float32
    )
    return Neighbors(np.zeros(scores.shape, np.int64), scores)


def show_times(what: str, search: Callable[[Embeddings], object], queries: Embeddings) -> None:
    """Prints p50 and p99 of one query at a time, from one client and from many."""
    for clients in CLIENTS:
        taken: list[float] = []

        def ask(first: int, taken: list[float] = taken, clients: int = clients) -> None:
            for n in range(first, len(queries), clients):
                started = time.perf_counter()
                search(queries[n : n + 1])
                taken.append(time.perf_counter() - started)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate = len(queries) / (time.perf_counter() - started)
        p50, p99 = np.percentile(taken, [50, 99]) * 1000
        print(
            f"{what}, {clients} clients: p50 {p50:.2f} ms, p99 {p99:.2f} ms, {rate:,.0f} queries/s",
            flush=True,
        )


def show_faiss(rows: Embeddings, queries: Embeddings, truth: Neighbors, effort: int) -> None:
    print(f"== bare faiss, in memory, {LINKS} links, effort {effort}", flush=True)
    index = faiss.IndexHNSWFlat(rows.shape[1], LINKS, faiss.METRIC_INNER_PRODUCT)
    started = time.perf_counter()
    index.add(rows)
    print(f"adds, not durable, indexed: {len(rows) / (time.perf_counter() - started):,.0f} items/s")
    index.hnsw.efSearch = effort
    scores, ids = index.search(queries, TOP)
    print(f"recall@{TOP}: {measure(Neighbors(ids, scores), truth, 0, len(rows)).measured:.4f}")
    show_times("all items", lambda query: index.search(query, TOP), queries)
    print(f"disk: {len(faiss.serialize_index(index)) / len(rows):,.0f} bytes an item, if written")


def disk_bytes(place: str, milvus_data: Path | None) -> int:
    if not is_store(place):
        return folder_bytes(Path(place))
    if kind_of(place) == "milvus":
        return 0 if milvus_data is None else folder_bytes(milvus_data)
    import psycopg

    query = (
        "SELECT sum(pg_total_relation_size(relation.oid)) FROM pg_class AS relation"
        " JOIN pg_namespace AS room ON room.oid = relation.relnamespace"
        " WHERE room.nspname = 'mlcd' AND relation.relkind = 'r'"
    )
    with psycopg.connect(place) as connection:
        (found,) = connection.execute(query).fetchone() or (0,)
    return int(found or 0)


def folder_bytes(folder: Path) -> int:
    """Returns what the files take, of which others may be deleted meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_blocks * 512 if file.is_file() else 0
    return total


if __name__ == "__main__":
    main()
