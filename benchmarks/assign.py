"""Exact top-8 centers: every arithmetic of ours against faiss on the same data, interleaved.

    python benchmarks/assign.py [--rows 512] [--centers 32768] [--dimension 768]
                                [--data random|families]
    python benchmarks/assign.py --embeddings DIR --centers-of DIR

It prints medians (least to most), effective GF/s (of the products that brute force needs), rows by
the level of the scan that settled them, and the memory that each contender takes beyond the data. A
sample of rows is audited against float64 brute force: label sets must be identical on every one of
them, or the exit status is 1.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, cast

import faiss
import numpy as np

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.clustering.nearest import CenterScan, MatmulName
from mlcd.types import Embeddings, ScanCounts, unit_rows

_FAMILY = 32
_SPREAD = 0.02  # deviation of a family's members from its middle, in units of the middle's length
_AUDIT_BLOCK = 8192


def main() -> None:
    options = read_options()
    rows, centers = read_data(options)
    if options.memory_of:
        print(extra_memory(options.memory_of, rows, centers, options.top))
        return
    source = options.embeddings.name if options.embeddings else options.data
    print(
        f"{source}: {len(rows)} rows, {len(centers)} centers of {rows.shape[1]}, top {options.top}"
    )
    names = [*arithmetics(), "faiss.knn", "IndexFlatIP"]
    if options.only:
        names = [name for name in names if name in options.only.split(",")]
    contenders = {name: open_contender(name, rows, centers, options.top) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    answers: dict[str, np.ndarray] = {}
    # The first run warms up.
    for _ in range(options.runs + 1):
        for name, work in contenders.items():
            started = time.perf_counter()
            answers[name] = work()
            seconds[name].append(time.perf_counter() - started)
    for name, times in seconds.items():
        report(
            name,
            times[1:],
            seconds.get("faiss.knn", times)[1:],
            2 * len(rows) * centers.size,
            options,
        )
    for name, counts in scan_counts(rows, centers, options.top, names).items():
        levels = (
            f"{counts.proven} first pass, {counts.wider} wider, {counts.float32} float32, "
            f"{counts.float64} float64"
        )
        print(f"{name:12} ({counts.products}) rows settled by: {levels}")
    sys.exit(0 if audit(rows, centers, answers, options.audited) else 1)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--centers", type=int, default=32768)
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--data", choices=["random", "families"], default="random")
    parser.add_argument("--embeddings", type=Path, help="An artifact; then --centers-of as well.")
    parser.add_argument("--centers-of", type=Path)
    parser.add_argument("--only", help="Contenders, separated by commas.")
    parser.add_argument("--audited", type=int, default=128)
    parser.add_argument(
        "--no-memory",
        action="store_true",
        help="Do not measure memory, which takes a process each.",
    )
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def read_data(options: argparse.Namespace) -> tuple[Embeddings, Embeddings]:
    if options.embeddings is not None:
        centers = Centers.open(options.centers_of)
        rows = np.concatenate(
            [block for _, block in EmbeddingsArtifact.open(options.embeddings).blocks()]
        )
        return centers.align(rows[: options.rows]), centers.vectors
    generator = np.random.default_rng(0)
    shape = (options.centers, options.dimension)
    noise = generator.standard_normal(shape, dtype=np.float32)
    if options.data == "random":
        rows = generator.standard_normal((options.rows, options.dimension), dtype=np.float32)
        return unit_rows(rows), unit_rows(noise)
    middles = unit_rows(
        generator.standard_normal((-(-options.centers // _FAMILY), options.dimension))
    )
    centers = np.repeat(middles, _FAMILY, axis=0)[: options.centers]
    centers = unit_rows(centers + np.float32(_SPREAD / options.dimension**0.5) * noise)
    near = centers[generator.integers(0, len(centers), options.rows)]
    return unit_rows(
        near + 0.5 / options.dimension**0.5 * generator.standard_normal(near.shape)
    ), centers


def arithmetics() -> list[MatmulName | Literal["auto"]]:
    names: list[MatmulName | Literal["auto"]] = ["auto", "numpy"]
    if find_spec("torch") is not None:
        from mlcd.clustering.torch_matmul import cuda_available

        names += ["torch-fp32", "torch-bf16"]
        names += ["cuda-bf16"] if cuda_available() else []
    return names


def open_contender(
    name: str, rows: Embeddings, centers: Embeddings, top: int
) -> Callable[[], np.ndarray]:
    """Returns the work, with the centers prepared once for many calls."""
    if name == "faiss.knn":
        return lambda: faiss.knn(rows, centers, top, metric=faiss.METRIC_INNER_PRODUCT)[1]
    if name == "IndexFlatIP":
        index = faiss.IndexFlatIP(centers.shape[1])
        index.add(centers)
        return lambda: index.search(rows, top)[1]
    scan = CenterScan(centers, matmul=cast(MatmulName, name))
    return lambda: scan.nearest(rows, top).ids


def scan_counts(
    rows: Embeddings, centers: Embeddings, top: int, names: list[str]
) -> dict[str, ScanCounts]:
    ours = [name for name in arithmetics() if name in names]
    found = {name: CenterScan(centers, matmul=name).nearest(rows, top).scan for name in ours}
    return {name: counts for name, counts in found.items() if counts is not None}


def report(
    name: str, times: list[float], theirs: list[float], flop: int, options: argparse.Namespace
) -> None:
    ratio = statistics.median(their / our for our, their in zip(times, theirs, strict=True))
    line = f"{name:12} {statistics.median(times):7.3f} s ({min(times):.3f} to {max(times):.3f})"
    line += f"  {flop / statistics.median(times) / 1e9:6.1f} GF/s  {ratio:.2f} of faiss.knn's speed"
    if not options.no_memory:
        line += f"  {measured_memory(name) / 2**20:6.0f} MiB"
    print(line, flush=True)


def measured_memory(name: str) -> int:
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--memory-of", name],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def extra_memory(name: str, rows: Embeddings, centers: Embeddings, top: int) -> int:
    """Returns the growth of the process's peak in bytes, after a warm-up on a few rows."""
    open_contender(name, rows[:8], centers[:512], top)()
    # The peak starts anew, because making the data had a higher one.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    open_contender(name, rows, centers, top)()
    return peak_bytes() - before


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def audit(
    rows: Embeddings, centers: Embeddings, answers: dict[str, np.ndarray], num_audited: int
) -> bool:
    """Tells if each of ours has the very ids of float64 brute force on every audited row."""
    chosen = np.random.default_rng(1).permutation(len(rows))[:num_audited]
    wide = rows[chosen].astype(np.float64)
    parts = [
        wide @ centers[at : at + _AUDIT_BLOCK].astype(np.float64).T
        for at in range(0, len(centers), _AUDIT_BLOCK)
    ]
    exact = np.concatenate(parts, axis=1)
    top = next(iter(answers.values())).shape[1]
    passed = True
    for name, ids in answers.items():
        expected = np.argsort(-exact, axis=1, kind="stable")[:, :top]
        same = float(
            np.mean(
                [
                    set(a) == set(b)
                    for a, b in zip(ids[chosen].tolist(), expected.tolist(), strict=True)
                ]
            )
        )
        print(f"{name:12} identical label sets on {100 * same:.2f} % of {len(chosen)} audited rows")
        passed &= same == 1.0 or name in ("faiss.knn", "IndexFlatIP")
    return passed


if __name__ == "__main__":
    main()
