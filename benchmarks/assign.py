"""Exact top-8 centers: ours against faiss on the same data, interleaved in one run.

    python benchmarks/assign.py [--rows 2048] [--centers 16384] [--dimension 768] [--runs 5]

Prints medians (min to max) and the ratio; identical label sets are checked in passing.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import faiss
import numpy as np

from mlcd.clustering.nearest import nearest_centers
from mlcd.types import unit_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--centers", type=int, default=16384)
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    rows = unit_rows(generator.standard_normal((options.rows, options.dimension)))
    centers = unit_rows(generator.standard_normal((options.centers, options.dimension)))
    contenders: dict[str, Callable[[], np.ndarray]] = {
        "mlcd": lambda: nearest_centers(rows, centers, top=8).ids,
        "faiss.knn": lambda: faiss.knn(rows, centers, 8, metric=faiss.METRIC_INNER_PRODUCT)[1],
    }
    answers = {name: work() for name, work in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.runs):
        for name, work in contenders.items():
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
    for name, times in seconds.items():
        print(f"{name:10} {statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})")
    ratios = [theirs / ours for ours, theirs in zip(seconds["mlcd"], seconds["faiss.knn"], strict=True)]
    same = np.mean([set(ours) == set(theirs) for ours, theirs in zip(*answers.values(), strict=True)])
    print(f"faiss.knn / mlcd: {statistics.median(ratios):.2f}x; identical label sets: {100 * same:.2f} % of rows")


if __name__ == "__main__":
    main()
