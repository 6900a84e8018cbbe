"""The cost of a durable collection above bare faiss: the same index and queries, in turns.

    python benchmarks/search.py [--items 1000000] [--dimension 512] [--recall 0.95]
    python benchmarks/search.py --device cuda [--items 1000000] [--dimension 512]

It prints queries per second with p50 and p99, one query at a time and 64 at a time, of the
collection and of the faiss index inside it, called directly with the same effort (candidates are
scored again if ours does so), and the recall@10 of both. It also prints durable adds per second,
many at once, one by one and from 16 threads; the time to make an index; the start from a snapshot;
filters that leave 1, 10 and 50 %; and memory. The data are synthetic: 24 dimensions, bent into the
requested ones, with noise. Queries are drawn in the same way.

--device: in place of all this, the indexes that a GPU can search, as collections make them,
searched by faiss on the CPU and on that device (a copy), in turns, without the service's second
scoring; needs faiss-gpu where it is cuda. Collections themselves search on the CPU.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.indexes.index_kind import Kind, training_rows
from mlcd.indexes.tuning import measure
from mlcd.types import Embeddings, Neighbors, unit_rows

TOP: Final = 10
# The dimensions of the surface: fewer than the vectors have, as with real features.
LATENT: Final = 24
BATCH: Final = 64
ROUNDS: Final = 5
NUM_QUERIES: Final = 400
# The per cent of the items that a filter leaves: the metadata `n` is uniform in 0 to 99.
SHARES: Final = (1, 10, 50)
ADDED_AT_ONCE: Final = 8192
WRITERS: Final = 16
# a graph is searched on the CPU only
ON_DEVICE: Final[tuple[Kind, ...]] = ("flat", "ivf-sq8")
DEVICE_BATCHES: Final = (1, 64, 1024)
DEVICE_EFFORTS: Final = (8, 32)  # cells looked into


class Surface:
    """Rows near a bent surface of few dimensions, whose neighbors are on all sides, as with
    features.
    """

    def __init__(self, dimension: int) -> None:
        self._random = np.random.default_rng(0)
        self._bend = (
            self._random.standard_normal((LATENT, dimension), dtype=np.float32) / LATENT**0.5
        )

    def draw(self, num: int) -> Embeddings:
        places = self._random.standard_normal((num, LATENT), dtype=np.float32)
        rows = np.tanh(2 * places @ self._bend)
        return unit_rows(rows + 0.2 * self._random.standard_normal(rows.shape, dtype=np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--recall", type=float, default=0.95)
    parser.add_argument(
        "--folder", type=Path, help="On the disk that is to be measured; default: a temporary one."
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="the indexes of faiss alone")
    options = parser.parse_args()
    if find_spec("faiss") is None:
        print("left out: faiss is not installed here (pip install faiss-cpu, or faiss-gpu)")
        return
    if options.device:
        show_device(options.device, options.items, options.dimension)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run(Path(folder) / "collection", options.items, options.dimension, options.recall)


def run(path: Path, num_items: int, dimension: int, recall: float) -> None:
    data = Surface(dimension)
    before = memory_bytes()
    with Collection.create(
        path, fingerprint="0" * 64, dimension=dimension, recall=recall, background=False
    ) as collection:
        show_adds(collection, data, num_items)
        taken = seconds(collection.reindex)
        described = collection.describe()
        print(
            f"index: {described.kind}, effort {described.effort}, made, tuned and audited in "
            f"{taken:.0f} s"
        )
        print(f"audit: {described.recall}", flush=True)
    started = time.perf_counter()
    with Collection.open(path, background=False) as collection:
        print(f"start from snapshot, every byte verified: {time.perf_counter() - started:.1f} s")
        disk_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        print(f"disk: {disk_bytes / num_items:.0f} bytes an item")
        queries = data.draw(NUM_QUERIES)
        show_searches(collection, queries)
        show_filters(collection, queries)
        anonymous = memory_bytes() - before
        print(
            f"memory beyond mapped files: {anonymous / len(collection) * 1e6 / 2**30:.2f} GiB a "
            "million items"
        )


def show_adds(collection: Collection, data: Surface, num_items: int) -> None:
    taken = 0.0
    for start in range(0, num_items, ADDED_AT_ONCE):
        num = min(ADDED_AT_ONCE, num_items - start)
        items = [
            Item(f"item-{start + n}", row, {"n": (start + n) % 100})
            for n, row in enumerate(data.draw(num))
        ]
        taken += seconds(partial(collection.add, items))
    print(f"durable adds, {ADDED_AT_ONCE} at once: {num_items / taken:,.0f} items/s")
    rows = data.draw(200 + 50 * WRITERS)
    alone = seconds(
        lambda: [collection.add([Item(f"one-{n}", rows[n], {"n": n % 100})]) for n in range(200)]
    )
    print(f"durable adds, one by one: {200 / alone:,.0f} items/s")

    def write(writer: int) -> None:
        for n in range(50):
            collection.add([Item(f"thread-{writer}-{n}", rows[200 + 50 * writer + n], {"n": n})])

    together = seconds(lambda: in_threads(write))
    print(
        f"durable adds, one by one from {WRITERS} threads: {50 * WRITERS / together:,.0f} items/s",
        flush=True,
    )


def show_searches(collection: Collection, queries: Embeddings) -> None:
    """Measures ours and faiss in turns; each round's ratio is of its own time."""
    truth = scores_of(collection, queries, exact=True)
    bare = bare_search(collection)
    ours = measure(scores_of(collection, queries, exact=False), truth, 0, len(collection))
    print(f"recall@{TOP}: ours {ours.measured:.4f}", end="")
    if bare is None:
        print(", exact")
    else:
        scores, ids = bare(queries)
        print(
            ", bare faiss "
            f"{measure(Neighbors(ids, scores), truth, 0, len(collection)).measured:.4f}"
        )
    for num, name in ((1, "one query"), (BATCH, f"{BATCH} queries")):
        blocks = [queries[start : start + num] for start in range(0, len(queries) - num + 1, num)]
        arms: dict[str, Callable[[Embeddings], Any]] = {"ours": lambda z: collection.search(z, TOP)}
        if bare is not None:
            arms["faiss"] = bare
        rounds: dict[str, list[list[float]]] = {arm: [] for arm in arms}
        for _ in range(ROUNDS):
            for arm, search in arms.items():
                rounds[arm].append([seconds(partial(search, block)) for block in blocks])
        for arm, taken in rounds.items():
            every = np.concatenate(taken) * 1000
            rate = len(every) * num / (every.sum() / 1000)
            p50, p99 = np.percentile(every, [50, 99])
            print(f"{name}, {arm}: {rate:,.0f} queries/s, p50 {p50:.2f} ms, p99 {p99:.2f} ms")
        if bare is not None:
            ratios = [sum(a) / sum(b) for a, b in zip(rounds["ours"], rounds["faiss"], strict=True)]
            print(
                f"{name}: ours takes {statistics.median(ratios):.3f} of bare faiss's time "
                f"({spread(ratios)})"
            )
    exact = [
        seconds(partial(collection.search, z, TOP, exact=True)) for z in np.split(queries[:50], 50)
    ]
    print(f"one query, exact: p50 {statistics.median(exact) * 1000:.1f} ms", flush=True)


def show_filters(collection: Collection, queries: Embeddings) -> None:
    for share in SHARES:
        condition = {"field": "n", "lt": share}
        search = partial(collection.search, top=TOP, filter=condition)
        taken = [seconds(partial(search, z)) for z in np.split(queries[:200], 200)]
        truth = scores_of(collection, queries[:200], exact=True, filter=condition)
        found = measure(
            scores_of(collection, queries[:200], exact=False, filter=condition), truth, 0, 0
        )
        how = "scan" if collection.search(queries[:1], TOP, filter=condition).exact else "index"
        p50, p99 = np.percentile(np.array(taken) * 1000, [50, 99])
        print(
            f"filter leaving {share} %: p50 {p50:.2f} ms, p99 {p99:.2f} ms, recall "
            f"{found.measured:.4f} ({how})"
        )


def scores_of(collection: Collection, queries: Embeddings, **options: Any) -> Neighbors:
    found = collection.search(queries, TOP, **options).matches
    scores = np.array(
        [[match.similarity for match in matches] for matches in found], dtype=np.float32
    )
    return Neighbors(np.zeros(scores.shape, dtype=np.int64), scores)


def bare_search(collection: Collection) -> Callable[[Embeddings], Any] | None:
    """Returns a search of the engine alone with the same index and effort.

    It returns faiss's results unchanged. If ours scores candidates again, so does faiss
    (IndexRefine), from a copy of the vectors in memory.
    """
    import faiss

    generation = collection._searcher.generation  # noqa: SLF001 - the peer is what is inside
    tuned = generation.tuned
    if tuned.index is None:
        return None
    index = tuned.index._index  # type: ignore[attr-defined]  # noqa: SLF001
    params = tuned.index._parameters({}, tuned.effort)  # type: ignore[attr-defined]  # noqa: SLF001
    if tuned.widening > 1:
        copy = faiss.IndexFlatIP(collection.dimension)
        copy.add(np.ascontiguousarray(generation.vectors))
        index = faiss.IndexRefine(index, copy)
        params = faiss.IndexRefineSearchParameters(
            k_factor=tuned.widening, base_index_params=params
        )
    return lambda z: index.search(z, TOP, params=params)


def show_device(device: str, num_items: int, dimension: int) -> None:
    """Measures faiss's searches on the CPU and on a device; on "cpu" a copy takes its role."""
    import faiss

    from mlcd.indexes.faiss import FaissIndex

    if device == "cuda" and getattr(faiss, "get_num_gpus", int)() == 0:
        print("left out: faiss finds no GPU here (pip install faiss-gpu, in place of faiss-cpu)")
        return
    data = Surface(dimension)
    starts = range(0, num_items, ADDED_AT_ONCE)
    rows = np.concatenate([data.draw(min(ADDED_AT_ONCE, num_items - start)) for start in starts])
    queries = data.draw(max(DEVICE_BATCHES))
    truth = faiss.knn(queries, rows, TOP, metric=faiss.METRIC_INNER_PRODUCT)[1]
    for kind in ON_DEVICE:
        sample = rows[: training_rows(kind, num_items)]
        made = FaissIndex.train(kind, sample, num_rows=num_items)
        made.add(rows)
        host = made._index  # noqa: SLF001 - the peer is what is inside
        other = moved(host, device)
        for effort in DEVICE_EFFORTS if kind == "ivf-sq8" else (0,):
            for index in (host, other) if effort else ():
                index.nprobe = effort
            compare_devices(
                f"{kind}, {effort} cells" if effort else kind, host, other, queries, truth
            )


def moved(index: Any, device: str) -> Any:
    import faiss

    if device == "cpu":
        return faiss.clone_index(index)
    return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index)


def compare_devices(name: str, host: Any, other: Any, queries: Embeddings, truth: Any) -> None:
    found = {
        arm: index.search(queries, TOP)[1] for arm, index in (("cpu", host), ("device", other))
    }
    recall = {
        arm: np.mean([len(np.intersect1d(a, b)) for a, b in zip(ids, truth, strict=True)]) / TOP
        for arm, ids in found.items()
    }
    same = float((found["cpu"] == found["device"]).mean())
    print(
        f"{name}: recall@{TOP} cpu {recall['cpu']:.4f}, device {recall['device']:.4f}; "
        f"{same:.2%} of the ids are the same"
    )
    for num in DEVICE_BATCHES:
        taken: dict[str, list[float]] = {"cpu": [], "device": []}
        for _ in range(ROUNDS):
            for arm, index in (("cpu", host), ("device", other)):
                taken[arm].append(seconds(partial(index.search, queries[:num], TOP)))
        rates = {arm: num / statistics.median(times) for arm, times in taken.items()}
        ratios = [a / b for a, b in zip(taken["cpu"], taken["device"], strict=True)]
        print(
            f"{name}, {num} at once: cpu {rates['cpu']:,.0f} queries/s, device "
            f"{rates['device']:,.0f} queries/s, {statistics.median(ratios):.2f}x the CPU's "
            f"({spread(ratios)})",
            flush=True,
        )


def in_threads(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def spread(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


def memory_bytes() -> int:
    """Returns the memory of the process, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
