"""Selections: how even a balanced one is on a long tail.

    python benchmarks/curate.py --embeddings work/embeddings --num 150

It thins the classes to a long tail (the largest keeps 20 times what the smallest keeps), clusters
what is left without its classes, and compares the entropy of the classes of a balanced selection
with that of random ones.
"""

from pathlib import Path

import click
import numpy as np

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.novelty import nearest
from mlcd.clustering.sampling import balanced
from mlcd.types import unit_rows


@click.command()
@click.option("--embeddings", type=click.Path(path_type=Path), required=True)
@click.option("--num", type=int, required=True)
@click.option("--clusters", type=int, default=60, show_default=True)
@click.option("--seeds", default=10, show_default=True)
def main(embeddings: Path, num: int, clusters: int, seeds: int) -> None:
    opened = EmbeddingsArtifact.open(embeddings)
    rows, classes = unit_rows(opened.load()), np.unique(opened.class_names, return_inverse=True)[1]
    found = np.zeros((2, seeds))
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        order = generator.permutation(classes.max() + 1)
        shares = np.geomspace(1, 1 / 20, len(order))[order]
        left = np.flatnonzero(generator.random(len(rows)) < shares[classes])
        centers = kmeans([rows[left]], clusters, seed=seed).centers
        even = left[balanced([nearest(rows[left], centers)[0]], num, seed=seed)]
        random = generator.choice(left, num, replace=False)
        found[:, seed] = entropy(classes[even]), entropy(classes[random])
    gain = found[0] - found[1]
    low, high = np.quantile(
        gain[np.random.default_rng(0).integers(0, seeds, (9999, seeds))].mean(1), [0.025, 0.975]
    )
    print(
        f"entropy of {num} of about {len(left)} images: balanced {found[0].mean():.3f}, random"
        f" {found[1].mean():.3f}, the most {np.log(classes.max() + 1):.3f}; gain"
        f" {gain.mean():.3f} ({low:.3f} to {high:.3f}) over {seeds} seeds"
    )


def entropy(classes: np.ndarray) -> float:
    shares = np.bincount(classes)[np.bincount(classes) > 0] / len(classes)
    return float(-(shares * np.log(shares)).sum())


if __name__ == "__main__":
    main()
