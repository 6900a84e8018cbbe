"""Spherical k-means: ours against faiss and scikit-learn on the same rows, interleaved in one run.

    python benchmarks/kmeans.py [--rows 50000] [--clusters 1024] [--dimension 256]
                                [--iterations 6] [--runs 2]
    python benchmarks/kmeans.py --rows 200000 --clusters 4096 --dimension 768   # acceptance
    python benchmarks/kmeans.py --embeddings DIR --clusters 1024                # real embeddings
    python benchmarks/kmeans.py --curve OUT.svg [--embeddings DIR]        # objective over time
    python benchmarks/kmeans.py --host --clusters 250000 --dimension 768  # the CPU's part of a pass

Every contender runs in a process of its own, reads the rows from one .npy file and does the same
number of iterations. "mlcd (half)" does half as many, because the time to an objective counts. Time
is that of training alone, with the first centers and without imports or the start of a GPU; rows/s
are rows times iterations in it. Ours takes the arithmetic that is fastest on the machine, a GPU's
where there is one. Memory is the peak of the process (ours reads blocks, the others keep all rows).
The objective, the mean cosine of a row and its nearest center, is computed here in float64 for all.
The peers start from random rows. Synthetic rows are unit vectors around as many means as clusters.
The means are in families, and the spectrum decays as that of image embeddings does (--flat: it does
not).
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path
from typing import Final

import numpy as np

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.clustering.kmeans import check_equal
from mlcd.clustering.repair import next_centers
from mlcd.clustering.rows import ArrayRows, UnitRows
from mlcd.clustering.sums import SCALE, ClusterSums
from mlcd.types import unit_rows
from mlcd.world import World

_READ: Final = """
import json, re, sys, time
import numpy as np
path, out, k, iterations = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
"""
_WRITE: Final = """
np.save(out, np.ascontiguousarray(centers, dtype=np.float32))
# Not ru_maxrss: that begins with the parent's.
peak_kib = int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
print(json.dumps([seconds, peak_kib / 2**20]))
"""
_FAISS: Final = """
import faiss
rows = np.load(path)
{make}
began = time.perf_counter()
{train}
seconds = time.perf_counter() - began
"""
_OURS: Final = """
from pathlib import Path
import torch
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.rows import FileRows
if torch.cuda.is_available():  # starts it and compiles its kernels, as imports do
    from mlcd.clustering.device_scan import on_gpu
    first = np.load(path, mmap_mode="r")[:8192]
    scan, some = on_gpu(np.array(first)), torch.tensor(first[:512]).cuda()
    last = torch.full((len(some),), len(first) - 1, device="cuda")
    with torch.inference_mode():
        for room in scan.rooms:
            scan.propose(some, 1, room)
            scan.first(len(first) // 2).propose(some, 1, room, last)
    torch.cuda.synchronize()
began = time.perf_counter()
centers = kmeans(FileRows([Path(path)]), k, iterations={iterations}, tolerance=0.0).centers
seconds = time.perf_counter() - began
"""
_CONTENDERS: Final = {
    "mlcd": _OURS.format(iterations="iterations"),
    "mlcd (half)": _OURS.format(iterations="iterations // 2"),
    "faiss.Kmeans": _FAISS.format(
        make="trainer = faiss.Kmeans(rows.shape[1], k, niter=iterations, spherical=True, seed=1,"
        " early_stop_threshold=-1, max_points_per_centroid=10**9)",
        train="trainer.train(rows)\ncenters = trainer.centroids",
    ),
    # For unit rows L2 is equivalent; its centers are normalized afterwards.
    "faiss.SuperKMeans": _FAISS.format(
        make="parameters = faiss.SuperKMeansParameters()\nparameters.niter = "
        "iterations\nparameters.seed = 1\n"
        "parameters.early_stop_threshold = -1\nparameters.max_points_per_centroid = 10**9\n"
        "trainer = faiss.SuperKMeans(rows.shape[1], k, parameters)",
        train="trainer.train(rows)\ncenters = faiss.vector_to_array(trainer.centroids).reshape(k, "
        "-1)",
    ),
    "scikit-learn": """
from sklearn.cluster import KMeans
rows = np.load(path)
trainer = KMeans(k, init="random", n_init=1, max_iter=iterations, tol=0, random_state=1)
began = time.perf_counter()
centers = trainer.fit(rows).cluster_centers_
seconds = time.perf_counter() - began
""",
}
_REFERENCE: Final = "faiss.Kmeans"
# rows, clusters, dimension and whether the spectrum is flat
_SETTINGS: Final = (
    (20_000, 200, 1280, False),
    (50_000, 1024, 256, False),
    (50_000, 1024, 256, True),
    (100_000, 2048, 768, False),
)
_REAL_CLUSTERS: Final = (200, 1000)
_ROWS_EACH: Final = 400
_CURVE_ITERATIONS: Final = (1, 2, 3, 5, 8, 13)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--clusters", type=int, default=1024)
    parser.add_argument("--dimension", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument(
        "--flat", action="store_true", help="synthetic rows without a decaying spectrum"
    )
    parser.add_argument(
        "--embeddings", type=Path, help="an embeddings artifact instead of synthetic rows"
    )
    parser.add_argument("--only", nargs="*", choices=list(_CONTENDERS), default=list(_CONTENDERS))
    parser.add_argument("--curve", type=Path, help="picture of the objective over time, to write")
    parser.add_argument(
        "--host", action="store_true", help="what the CPU does in a pass where a GPU assigns rows"
    )
    options = parser.parse_args()
    if options.host:
        _time_host(options)
        return
    if options.curve is not None:
        _draw_curves(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = _rows(options)
        np.save(f"{folder}/rows.npy", rows)
        print(
            f"{len(rows)} rows of {rows.shape[1]}, {options.clusters} clusters, "
            f"{options.iterations} iterations"
        )
        measured: dict[str, list[tuple[float, float]]] = {
            name: [] for name in _available(options.only)
        }
        for _ in range(options.runs):
            for name, runs in measured.items():
                runs.append(_train(name, folder, options))
        _print_table(
            measured,
            len(rows) * options.iterations,
            {name: _objective(rows, np.load(f"{folder}/{name}.npy")) for name in measured},
        )


def _time_host(options: argparse.Namespace) -> None:
    """Prints the seconds of each part, the fastest of the runs, and the rate of rows read again."""
    generator = np.random.default_rng(0)
    drawn = generator.standard_normal((options.clusters, options.dimension), dtype=np.float32)
    centers = unit_rows(drawn)
    sums = (centers * (_ROWS_EACH * SCALE)).astype(np.int64)
    totals = ClusterSums(sums, np.full(len(centers), _ROWS_EACH))
    blocks = UnitRows(ArrayRows([centers]))
    parts = {
        "the centers of all processes are compared": lambda: check_equal(World(), centers, 0),
        "the objective": lambda: totals.objective(centers),
        "the next centers": lambda: next_centers(totals, centers, seed=0, iteration=1),
        "rows are checked": lambda: all(blocks.blocks(0, len(centers))),
    }
    for part, work in parts.items():
        seconds = min(timeit.repeat(work, number=1, repeat=max(2, options.runs)))
        print(f"{seconds:8.2f} s  {part}, {centers.nbytes / seconds / 1e9:.2f} GB/s")


def _draw_curves(options: argparse.Namespace) -> None:
    import matplotlib.pyplot as plt  # which a machine with a GPU may lack

    settings = [
        argparse.Namespace(
            rows=num, clusters=clusters, dimension=dimension, flat=is_flat, embeddings=None
        )
        for num, clusters, dimension, is_flat in _SETTINGS
    ]
    if options.embeddings is not None:
        settings += [
            argparse.Namespace(embeddings=options.embeddings, clusters=clusters)
            for clusters in _REAL_CLUSTERS
        ]
    figure, panels = plt.subplots(-(-len(settings) // 2), 2, figsize=(10, 3.2 * len(settings) / 2))
    for setting, panel in zip(settings, panels.flat, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            rows = _rows(setting)
            np.save(f"{folder}/rows.npy", rows)
            title = f"{len(rows):,} x {setting.clusters:,} x {rows.shape[1]:,}"
            title += ", flat" if getattr(setting, "flat", False) else ""
            title += ", real" if setting.embeddings else ""
            print(title)
            for name in _available([name for name in options.only if name != "mlcd (half)"]):
                points = _measure_curve(name, folder, rows, setting.clusters, options.runs)
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
                print(f"  {name:18}", "  ".join(f"{j:.5f} in {s:.2f} s" for s, j in points))
        panel.set_title(title, fontsize=9)
        panel.set_xscale("log")
        panel.set_xlabel("seconds")
        panel.set_ylabel("mean cosine")
    panels.flat[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(options.curve)


def _measure_curve(
    name: str, folder: str, rows: np.ndarray, clusters: int, runs: int
) -> list[tuple[float, float]]:
    """Returns the median seconds and the objective for each number of iterations."""
    points = []
    for iterations in _CURVE_ITERATIONS:
        options = argparse.Namespace(clusters=clusters, iterations=iterations)
        seconds = statistics.median(_train(name, folder, options)[0] for _ in range(runs))
        points.append((seconds, _objective(rows, np.load(f"{folder}/{name}.npy"))))
    return points


def _rows(options: argparse.Namespace) -> np.ndarray:
    if options.embeddings is not None:
        return EmbeddingsArtifact.open(options.embeddings).load()
    generator = np.random.default_rng(0)
    dimension = options.dimension
    weights = np.ones(dimension) if options.flat else (1.0 + np.arange(dimension)) ** -0.5
    rotation, _ = np.linalg.qr(generator.standard_normal((dimension, dimension)))
    families = generator.standard_normal((max(1, options.clusters // 32), dimension)) * weights
    means = families[np.arange(options.clusters) % len(families)]
    means = means + 0.7 * generator.standard_normal(means.shape) * weights
    rows = np.empty((options.rows, dimension), dtype=np.float32)
    for start in range(0, options.rows, 8192):
        around = means[generator.integers(0, options.clusters, min(8192, options.rows - start))]
        rows[start : start + 8192] = (
            around + 0.5 * generator.standard_normal(around.shape) * weights
        ) @ rotation
    return unit_rows(rows)


def _available(names: list[str]) -> list[str]:
    if importlib.util.find_spec("faiss") is None:
        missing = {"faiss.Kmeans": True, "faiss.SuperKMeans": True}
    else:
        import faiss

        missing = {"faiss.SuperKMeans": not hasattr(faiss, "SuperKMeans")}
    missing["scikit-learn"] = importlib.util.find_spec("sklearn") is None
    return [name for name in names if not missing.get(name)]


def _train(name: str, folder: str, options: argparse.Namespace) -> tuple[float, float]:
    """Returns (seconds, peak GiB)."""
    command = [
        sys.executable,
        "-c",
        _READ + _CONTENDERS[name] + _WRITE,
        f"{folder}/rows.npy",
        f"{folder}/{name}.npy",
    ]
    command += [str(options.clusters), str(options.iterations)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    seconds, gib = json.loads(output.splitlines()[-1])
    return seconds, gib


def _objective(rows: np.ndarray, centers: np.ndarray) -> float:
    unit = unit_rows(centers).astype(np.float64)
    parts = (rows[start : start + 4096].astype(np.float64) for start in range(0, len(rows), 4096))
    return float(sum((part @ unit.T).max(axis=1).sum() for part in parts)) / len(rows)


def _print_table(
    measured: dict[str, list[tuple[float, float]]], work: int, objectives: dict[str, float]
) -> None:
    """work: rows times iterations."""
    reference = [seconds for seconds, _ in measured.get(_REFERENCE, [])]
    for name, runs in measured.items():
        times = [seconds for seconds, _ in runs]
        line = f"{name:18} {statistics.median(times):8.2f} s ({min(times):.2f} to {max(times):.2f})"
        done = work // 2 if name == "mlcd (half)" else work
        line += f"  {done / statistics.median(times):,.0f} rows/s"
        line += f"  objective {objectives[name]:.6f}  peak {max(gib for _, gib in runs):.2f} GiB"
        if reference:
            ratio = statistics.median(
                theirs / its for theirs, its in zip(reference, times, strict=True)
            )
            line += f"  {ratio:.2f}x the speed of {_REFERENCE}"
        print(line)


if __name__ == "__main__":
    main()
