"""The cost of a durable collection above bare faiss: the same index and queries, in turns.

    python benchmarks/search.py [--items 1000000] [--dimension 512] [--recall 0.95]
    python benchmarks/search.py --device cuda [--items 1000000] [--dimension 512]

It prints queries per second with p50 and p99, one query at a time and 64 at a time, of the
collection and of the faiss index inside it, called directly with the same effort (candidates are
scored again if ours does so), and the recall@10 of both. It also prints durable adds per second,
many at once, one by one and from 16 threads; the time to make an index; the start from a snapshot;
filters that leave 1, 10 and 50 %; and memory. The data are synthetic: 24 dimensions, bent into the
requested ones, with noise. Queries are drawn in the same way.

--device: in place of all this, the ways in which a collection can search with a GPU, in turns with
those of the CPU: the exact scan on both, and with faiss the index of cells, tuned to --recall, on
the CPU; with faiss-gpu-cuvs the same index on the GPU, and CAGRA's graph. A machine without these
packages leaves them out and says so. --no-cells leaves out the cells: millions of items take
minutes.
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
from mlcd.indexes.scan import scan
from mlcd.indexes.tuning import Tuned, measure, rescore, tune
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
DEVICE_BATCHES: Final = (1, 64, 1024)


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
    parser.add_argument("--device", choices=["cpu", "cuda"], help="the searches without the rest")
    parser.add_argument("--no-cells", action="store_true", help="with --device: see above")
    options = parser.parse_args()
    if options.device:
        if not torch_runs_on(options.device) and not cuvs_runs_on(options.device):
            print("left out: neither torch nor faiss-gpu-cuvs finds a GPU here")
            return
        show_device(
            options.device,
            options.items,
            options.dimension,
            options.recall,
            has_cells=not options.no_cells,
        )
        return
    if find_spec("faiss") is None:
        print("left out: faiss is not installed here (pip install faiss-cpu)")
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run(Path(folder) / "collection", options.items, options.dimension, options.recall)


def torch_runs_on(device: str) -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return device == "cpu" or torch.cuda.is_available()


def cuvs_runs_on(device: str) -> bool:
    if device == "cpu" or find_spec("faiss") is None:
        return False
    from mlcd.indexes.faiss import searches_on_gpus

    return searches_on_gpus()


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


def show_device(
    device: str, num_items: int, dimension: int, recall: float, *, has_cells: bool
) -> None:
    """Measures every search of collections that can run here, in turns."""
    data = Surface(dimension)
    starts = range(0, num_items, ADDED_AT_ONCE)
    rows = np.concatenate([data.draw(min(ADDED_AT_ONCE, num_items - start)) for start in starts])
    queries = data.draw(max(DEVICE_BATCHES))
    truth = scan(queries, rows, TOP)
    arms = {"cpu scan": partial(scan, rows=rows, top=TOP), **graph_arms(rows, device, recall)}
    if has_cells:
        arms |= cell_arms(rows, device, recall)
    for name, search in arms.items():
        recalled = measure(search(queries), truth, recall, num_items).measured
        print(f"{name}: recall@{TOP} {recalled:.4f}", flush=True)
    for num in DEVICE_BATCHES:
        taken: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(ROUNDS):
            for arm, search in arms.items():
                taken[arm].append(seconds(partial(search, queries[:num])))
        for arm, times in taken.items():
            print(f"{num} at once, {arm}: {num / statistics.median(times):,.0f} queries/s", end="")
            for peer in ("cpu scan", "cpu index"):
                if arm != peer and peer in arms:
                    ratios = [a / b for a, b in zip(taken[peer], times, strict=True)]
                    median = statistics.median(ratios)
                    print(f", {median:.2f} times the {peer}'s ({spread(ratios)})", end="")
            print(flush=True)


def graph_arms(
    rows: Embeddings, device: str, recall: float
) -> dict[str, Callable[[Embeddings], Neighbors]]:
    """Returns the scan on the GPU and the graph beside it, by name; prints what is left out."""
    if not torch_runs_on(device):
        print("left out, as torch finds no GPU: gpu scan, gpu cagra")
        return {}
    from mlcd.indexes.device_rows import DeviceRows

    on_gpu = DeviceRows(rows, device)
    given: dict[str, Any] = {"top": TOP, "added": rows[:0], "allowed": None}
    arms: dict[str, Callable[[Embeddings], Neighbors]] = {
        "gpu scan": partial(on_gpu.search, **given)
    }
    if not cuvs_runs_on(device):
        print("left out, as it needs a GPU and faiss-gpu-cuvs: gpu cagra")
        return arms
    from mlcd.indexes.gpu_copy import CannotServe
    from mlcd.indexes.gpu_graph import GpuGraph

    started = time.perf_counter()
    try:
        graph = GpuGraph(on_gpu, rows, recall)
    except CannotServe as reason:
        print(f"left out, as a collection would not use it: gpu cagra: {reason}")
        return arms
    taken = time.perf_counter() - started
    print(
        f"gpu cagra: made and audited in {taken:.0f} s, {graph.speedup:.1f} times the gpu scan, "
        f"effort {graph.effort}, {graph.recall}",
        flush=True,
    )
    return arms | {"gpu cagra": partial(graph.search, **given)}


def cell_arms(
    rows: Embeddings, device: str, recall: float
) -> dict[str, Callable[[Embeddings], Neighbors]]:
    """Returns the searches of cells by name; prints what is left out."""
    if find_spec("faiss") is None:
        print("left out, as faiss is not installed: cpu index, gpu index")
        return {}
    tuned = tune(rows, recall, kind="ivf-sq8")
    if tuned.index is None:
        print(f"left out, as no effort reaches a recall of {recall}: cpu index, gpu index")
        return {}
    host = tuned.index._index  # type: ignore[attr-defined]  # noqa: SLF001 - the CPU's
    arms = {"cpu index": partial(search_cells, host, rows, tuned)}
    if not cuvs_runs_on(device):
        print("left out, as it needs a GPU and faiss-gpu-cuvs: gpu index")
        return arms
    from mlcd.indexes.faiss import _GpuCells

    return arms | {"gpu index": partial(search_cells, _GpuCells(host), rows, tuned)}


def search_cells(index: Any, rows: Embeddings, tuned: Tuned, queries: Embeddings) -> Neighbors:
    """Searches as a collection does, with the candidates scored again on the CPU."""
    params = tuned.index._parameters({}, tuned.effort)  # type: ignore[attr-defined]  # noqa: SLF001
    scores, ids = index.search(queries, TOP * tuned.widening, params=params)
    return rescore(queries, rows, Neighbors(ids, scores), TOP)


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
