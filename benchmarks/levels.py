"""Levels of clusters: what keeping the finer clusters whole costs, against k-means at each number.

    python benchmarks/levels.py --levels 200,40,10 --embeddings work/embeddings
    python benchmarks/levels.py --levels 2000,200,20 --mixture 200

Prints for each coarser level the mean cosine of rows and centers: where every row is with its
finest cluster, where it may go to the nearest center, and by k-means at that number (the best of
several seeds, and all of them).
"""

from pathlib import Path

import click
import numpy as np

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.levels import build_levels, composed
from mlcd.types import Embeddings, unit_rows


@click.command()
@click.option("--levels", required=True, help="Numbers of clusters, the finest first.")
@click.option("--embeddings", type=click.Path(path_type=Path))
@click.option("--mixture", type=int, help="So many random directions with 100 rows each, in 64.")
@click.option("--seeds", default=3, show_default=True)
def main(levels: str, embeddings: Path | None, mixture: int | None, seeds: int) -> None:
    if embeddings is not None:
        rows = unit_rows(EmbeddingsArtifact.open(embeddings).load())
    else:
        rows = drawn(mixture or 200)
    finest, *nums = map(int, levels.split(","))
    fine = kmeans([rows], finest)
    print(f"{len(rows)} rows, {finest} clusters: {fine.objective[-1]:.4f}")
    made = build_levels(fine.centers, fine.sizes, fine.cosines, nums)
    for level, of in zip(made, composed(made), strict=True):
        own = level.centers[of[fine.assignment]].astype(np.float64)
        whole = float(np.einsum("nd,nd->n", rows, own).mean())
        free = float((rows @ level.centers.T).max(axis=1).mean())
        num = len(level.centers)
        flat = [kmeans([rows], num, seed=seed).objective[-1] for seed in range(seeds)]
        print(
            f"{num} clusters: whole {whole:.4f}, free {free:.4f}, k-means"
            f" {max(flat):.4f} (of {', '.join(f'{each:.4f}' for each in flat)}),"
            f" ratio {whole / max(flat):.4f}"
        )


def drawn(num: int) -> Embeddings:
    generator = np.random.default_rng(0)
    means = unit_rows(generator.standard_normal((num, 64)))
    noise = 0.1 * generator.standard_normal((num * 100, 64))
    return unit_rows(np.repeat(means, 100, axis=0) + noise)


if __name__ == "__main__":
    main()
