"""Living clusters: classes arrive after the others were clustered. What stays? How pure is the new?

    python benchmarks/living.py --embeddings work/embeddings --old 20 --clusters 40

The classes are those of the embeddings (sub-folders), in the order of their hash. Old classes are
clustered, the others arrive. Prints the share of old images that keep their cluster, and the purity
of the new classes' images, beside that of all images clustered from scratch into as many clusters.
"""

from pathlib import Path

import click
import numpy as np

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.novelty import nearest, new_centers, own_quantiles
from mlcd.clustering.quality import purity
from mlcd.randomness import permutation
from mlcd.types import unit_rows


@click.command()
@click.option("--embeddings", type=click.Path(path_type=Path), required=True)
@click.option("--old", "num_old", type=int, required=True, help="So many classes are there first.")
@click.option("--clusters", type=int, required=True, help="Clusters of the old classes.")
@click.option("--quantile", type=float, default=0.95, show_default=True)
@click.option("--with-more", type=float, default=0.0, help="That share of old images arrives too.")
@click.option("--new", type=int, help="So many new clusters are looked for.")
@click.option("--seeds", default=3, show_default=True)
def main(
    embeddings: Path,
    num_old: int,
    clusters: int,
    quantile: float,
    with_more: float,
    new: int | None,
    seeds: int,
) -> None:
    opened = EmbeddingsArtifact.open(embeddings)
    rows, classes = unit_rows(opened.load()), np.array(opened.class_names)
    names = np.unique(classes)
    for seed in range(seeds):
        shuffled = names[permutation(len(names), seed)]
        of_old = np.isin(classes, shuffled[:num_old])
        late = of_old & (np.random.default_rng(seed).random(len(rows)) < with_more)
        first, arriving = of_old & ~late, ~of_old | late
        old = kmeans([rows[first]], clusters, seed=seed)
        own, distances = nearest(rows[first], old.centers)
        quantiles = own_quantiles(own, distances, clusters, quantile)
        found, aside = new_centers(
            rows[arriving],
            old.centers,
            quantiles,
            typical=int(np.median(old.sizes)),
            num=new,
            least=5,
            seed=seed,
        )
        both = np.concatenate([old.centers, found])
        now, _ = nearest(rows, both)
        stay = (now[first] == own).mean()
        scratch = kmeans([rows], len(both), seed=seed)
        ours, theirs = (
            purity(clusters_of[~of_old], classes[~of_old].tolist())
            for clusters_of in (now, scratch.assignment)
        )
        print(
            f"seed {seed}: {len(found)} new clusters of {arriving.sum()} images ({aside.sum()}"
            f" aside); {100 * stay:.1f} % of {first.sum()} old images keep theirs; purity of new"
            f" classes {ours:.3f}, from scratch {theirs:.3f}"
        )


if __name__ == "__main__":
    main()
