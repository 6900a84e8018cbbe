"""Selections: how even a balanced one is on a long tail, and whether planted copies are found.

    python benchmarks/curate.py balance --embeddings work/embeddings --num 150
    python benchmarks/curate.py copies --images photos --model starter --num 200

`balance` thins the classes to a long tail (the largest keeps 20 times what the smallest keeps),
clusters what is left without its classes, and compares the entropy of the classes of a balanced
selection with that of random ones. `copies` adds four copies of each photograph (JPEG 50, a crop of
90 %, the mirror image, half the size) and counts the pairs found.
"""

import tempfile
from itertools import combinations
from pathlib import Path

import click
import numpy as np
from PIL import Image, ImageOps

from mlcd.api import embed
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.clustering.close_pairs import close_pairs
from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.novelty import nearest
from mlcd.clustering.selection import balanced
from mlcd.progress import Reporter
from mlcd.types import unit_rows

SUFFIXES = {".jpg", ".jpeg", ".png"}


@click.group()
def main() -> None:
    pass


@main.command()
@click.option("--embeddings", type=click.Path(path_type=Path), required=True)
@click.option("--num", type=int, required=True)
@click.option("--clusters", type=int, default=60, show_default=True)
@click.option("--seeds", default=10, show_default=True)
def balance(embeddings: Path, num: int, clusters: int, seeds: int) -> None:
    opened = EmbeddingsArtifact.open(embeddings)
    rows, classes = unit_rows(opened.load()), np.unique(opened.class_names, return_inverse=True)[1]
    found = np.zeros((2, seeds))
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        order = generator.permutation(classes.max() + 1)
        shares = np.geomspace(1, 1 / 20, len(order))[order]
        left = np.flatnonzero(generator.random(len(rows)) < shares[classes])
        centers = kmeans([rows[left]], clusters, seed=seed).centers
        even = left[balanced(nearest(rows[left], centers)[0], num, seed=seed)]
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


@main.command()
@click.option("--images", type=click.Path(path_type=Path), required=True)
@click.option("--model", required=True)
@click.option("--num", type=int, default=200, show_default=True)
def copies(images: Path, model: str, num: int) -> None:
    paths = sorted(path for path in images.rglob("*") if path.suffix.lower() in SUFFIXES)
    paths = paths[:: max(1, len(paths) // num)][:num]
    with tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(paths):
            plant(path, Path(folder), number)
        made = embed(folder, model=model)
    rows, of = made.vectors, np.array([key.split("-")[0] for key in made.keys])
    kinds = np.array([Path(key).stem.split("-")[1] for key in made.keys])
    exact = rows.astype(np.float64) @ rows.T.astype(np.float64)
    planted = {
        pair
        for one in np.unique(of)
        for pair in combinations(np.flatnonzero(of == one).tolist(), 2)
    }
    for bar in (0.8, 0.85, 0.9, 0.93, 0.96):
        pairs = close_pairs(rows, bar, meter=Reporter("silent").stage("", 1).__enter__())
        found = set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))
        truth = {(a, b) for a, b in zip(*np.nonzero(np.triu(exact >= bar, 1)), strict=True)}
        originals = {
            kind: np.mean(
                [(min(pair), max(pair)) in found for pair in with_original(of, kinds, kind)]
            )
            for kind in ("jpeg", "crop", "mirror", "half")
        }
        print(
            f"{bar}: as all pairs {found == truth}, recall"
            f" {len(found & planted) / len(planted):.3f}, precision"
            f" {len(found & planted) / max(1, len(found)):.3f},"
            f" with the original {', '.join(f'{k} {v:.3f}' for k, v in originals.items())}"
        )


def with_original(of: np.ndarray, kinds: np.ndarray, kind: str) -> list[tuple[int, ...]]:
    """Returns the rows of each photograph and of its copy of this kind."""
    rows = (
        np.flatnonzero((of == one) & np.isin(kinds, ["original", kind])) for one in np.unique(of)
    )
    return [tuple(pair.tolist()) for pair in rows]


def plant(path: Path, folder: Path, number: int) -> None:
    """Writes a photograph and its copies."""
    with Image.open(path) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    width, height = image.size
    margin = 0.5 * (1 - 0.9**0.5)  # on each side, so that 90 % of the area is left
    box = (width * margin, height * margin, width * (1 - margin), height * (1 - margin))
    image.save(folder / f"{number}-original.png")
    image.save(folder / f"{number}-jpeg.jpg", quality=50)
    image.crop(tuple(map(round, box))).save(folder / f"{number}-crop.png")
    ImageOps.mirror(image).save(folder / f"{number}-mirror.png")
    image.resize((max(1, width // 2), max(1, height // 2))).save(folder / f"{number}-half.png")


if __name__ == "__main__":
    main()
