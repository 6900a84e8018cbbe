"""Clusters of real embeddings: ours beside scikit-learn's and faiss's, on the same rows, for the same seeds.

    python benchmarks/clusters.py --embeddings DIR [DIR ...] [--vectors FILE.npy ...] [--clusters 20 100 500]

Embeddings artifacts with class names give purity and NMI; plain vectors (.npy, [N, D]) only the objective, the mean
cosine of a row and its nearest center, in float64. Rows are made unit, and their mean is subtracted first where
--subtract-mean says so. All three run to convergence or --iterations, from random rows, once per seed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import faiss
import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.quality import purity
from mlcd.types import Embeddings, unit_rows

Cluster = Callable[[Embeddings, int, int, int], NDArray[np.floating]]
_BLOCK: Final = 4096


def ours(rows: Embeddings, num_clusters: int, iterations: int, seed: int) -> NDArray[np.floating]:
    return kmeans([rows], num_clusters, iterations=iterations, tolerance=0.0, seed=seed).centers


def scikit_learn(
    rows: Embeddings, num_clusters: int, iterations: int, seed: int
) -> NDArray[np.floating]:
    trainer = KMeans(
        num_clusters, init="random", n_init=1, max_iter=iterations, tol=0, random_state=seed
    )
    centers: NDArray[np.floating] = trainer.fit(rows).cluster_centers_
    return centers


def faiss_kmeans(
    rows: Embeddings, num_clusters: int, iterations: int, seed: int
) -> NDArray[np.floating]:
    trainer = faiss.Kmeans(
        rows.shape[1],
        num_clusters,
        niter=iterations,
        spherical=True,
        seed=seed + 1,  # 0 is no seed to faiss
        early_stop_threshold=-1,
        max_points_per_centroid=10**9,
    )
    trainer.train(rows)
    centers: NDArray[np.floating] = trainer.centroids
    return centers


CONTENDERS: Final[dict[str, Cluster]] = {
    "mlcd": ours,
    "faiss.Kmeans": faiss_kmeans,
    "scikit-learn": scikit_learn,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--embeddings", type=Path, nargs="*", default=[])
    parser.add_argument("--vectors", type=Path, nargs="*", default=[])
    parser.add_argument("--clusters", type=int, nargs="+", default=[20, 100, 500])
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--subtract-mean", action="store_true")
    options = parser.parse_args()
    print(
        "| rows | k | by | objective | purity | NMI | seconds |\n|---|---:|---|---:|---:|---:|---:|"
    )
    for path in (*options.embeddings, *options.vectors):
        rows, classes = read_rows(path)
        if options.subtract_mean:
            rows = unit_rows(rows - rows.mean(axis=0, dtype=np.float64))
        for num_clusters in options.clusters:
            if num_clusters < len(rows):
                compare(
                    f"{path.stem} ({len(rows):,} x {rows.shape[1]})",
                    rows,
                    classes,
                    num_clusters,
                    options,
                )


def read_rows(path: Path) -> tuple[Embeddings, list[str] | None]:
    if path.suffix == ".npy":
        return unit_rows(np.load(path, allow_pickle=False)), None
    embeddings = EmbeddingsArtifact.open(path)
    names = embeddings.class_names  # train/dog and val/dog are one class
    return embeddings.load(), None if None in names else [
        str(name).rsplit("/", 1)[-1] for name in names
    ]


def compare(
    title: str,
    rows: Embeddings,
    classes: list[str] | None,
    num_clusters: int,
    options: argparse.Namespace,
) -> None:
    measured: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    for seed in range(options.seeds):
        for name, cluster in CONTENDERS.items():
            began = time.perf_counter()
            centers = cluster(rows, num_clusters, options.iterations, seed)
            seconds = time.perf_counter() - began
            measured[name].append([*quality(rows, centers, classes), seconds])
    for name, runs in measured.items():
        cells = [
            cell(values, digits)
            for values, digits in zip(zip(*runs, strict=True), (4, 3, 3, 2), strict=True)
        ]
        print(f"| {title} | {num_clusters} | {name} | {' | '.join(cells)} |", flush=True)


def quality(
    rows: Embeddings, centers: NDArray[np.floating], classes: list[str] | None
) -> list[float]:
    """(objective, purity, NMI); the last two NaN without classes."""
    unit = unit_rows(centers).astype(np.float64)
    scores = [
        rows[start : start + _BLOCK].astype(np.float64) @ unit.T
        for start in range(0, len(rows), _BLOCK)
    ]
    assignment = np.concatenate([part.argmax(axis=1) for part in scores])
    objective = sum(float(part.max(axis=1).sum()) for part in scores) / len(rows)
    if classes is None:
        return [objective, float("nan"), float("nan")]
    return [
        objective,
        purity(assignment, classes),
        float(normalized_mutual_info_score(classes, assignment)),
    ]


def cell(values: tuple[float, ...], digits: int) -> str:
    if np.isnan(values).any():
        return ""
    middle, least, most = (
        f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({least} to {most})"


if __name__ == "__main__":
    main()
