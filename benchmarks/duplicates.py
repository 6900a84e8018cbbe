"""Near duplicates cell by cell beside all pairs: the same pairs, in which time and memory.

    python benchmarks/duplicates.py photographs 'shards/*.tar' --work work --model starter
    python benchmarks/duplicates.py synthetic --work work --rows 1000000

`photographs` embeds the images and four altered copies of some of them (JPEG 50, the middle 90 % of
the area, the mirror image, half the size) below --work, which a second run finds again. It compares
the pairs found with those of all pairs in float64, counts the planted ones among them, and takes
both times in turn. `synthetic` searches rows around random directions, of which each hundredth is a
near copy, in a file, and tells the peak of the process's own memory and that with mapped files.
"""

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.clustering.close_pairs import PairSearch
from mlcd.collections.duplicates import duplicate_groups
from mlcd.encoders import open_encoder
from mlcd.images.sources import open_source
from mlcd.pipelines.embed import embed
from mlcd.pipelines.resolve import resolve_model
from mlcd.progress import Reporter
from mlcd.randomness import hash_counters
from mlcd.types import Embeddings

TILE = 2048
SLACK = 1e-4  # far above what float32 rounds a cosine by
Pairs = set[tuple[int, int]]


@click.group()
def main() -> None:
    pass


@main.command()
@click.argument("images")
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--model", default="starter", show_default=True)
@click.option("--originals", default=250, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--similarities", default="0.8,0.9,0.96", show_default=True)
def photographs(
    images: str, work: Path, model: str, originals: int, rounds: int, similarities: str
) -> None:
    source = open_source(images)
    chosen = np.sort(np.argsort(hash_counters(0, np.arange(len(source.entries))))[:originals])
    for row in chosen.tolist():
        entry = source.entries[row]
        plant(source.read(entry), work / "copies", row)
    with closing(open_encoder(resolve_model(model, lambda _: None))) as encoder:
        for place, name in ((images, "base"), (str(work / "copies"), "copied")):
            embed(open_source(place), encoder, work / name, Reporter())
    base, copied = (EmbeddingsArtifact.open(work / name) for name in ("base", "copied"))
    rows = np.concatenate([each.unit_rows_at(np.arange(each.num_rows)) for each in (base, copied)])
    row_of = {key: row for row, key in enumerate(base.keys)}
    of = np.arange(len(rows))
    kinds = np.full(len(rows), "original", dtype=object)
    for row, key in enumerate(copied.keys, base.num_rows):
        number, kinds[row] = Path(key).stem.split("-")
        of[row] = row_of[source.entries[int(number)].key]
    print(f"{base.num_rows} photographs and {copied.num_rows} copies, {rows.shape[1]} numbers each")
    for similarity in map(float, similarities.split(",")):
        compare(rows, of, kinds, similarity, rounds)


def plant(data: bytes, folder: Path, number: int) -> None:
    """Writes the copies of a photograph, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / f"{number}-half.png").exists():
        return
    with Image.open(io.BytesIO(data)) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    width, height = image.size
    margin = 0.5 * (1 - 0.9**0.5)  # on each side, so that 90 % of the area is left
    box = (width * margin, height * margin, width * (1 - margin), height * (1 - margin))
    image.save(folder / f"{number}-jpeg.jpg", quality=50)
    image.crop(tuple(map(round, box))).save(folder / f"{number}-crop.png")
    ImageOps.mirror(image).save(folder / f"{number}-mirror.png")
    image.resize((max(1, width // 2), max(1, height // 2))).save(folder / f"{number}-half.png")


def compare(
    rows: Embeddings,
    of: NDArray[np.int64],
    kinds: NDArray[np.object_],
    similarity: float,
    rounds: int,
) -> None:
    found, truth = by_cells(rows, similarity), all_pairs(rows, similarity)
    right = len(found & truth)
    planted = {(int(of[row]), int(row)) for row in np.flatnonzero(kinds != "original")}
    shares = ", ".join(
        f"{kind} {np.mean([pair in found for pair in planted if kinds[pair[1]] == kind]):.3f}"
        for kind in ("jpeg", "crop", "mirror", "half")
    )
    print(
        f"{similarity}: {len(found)} pairs, recall {right / max(1, len(truth)):.4f}, precision"
        f" {right / max(1, len(found)):.4f} against all pairs; planted pairs found: {shares}"
    )
    ways: dict[str, Callable[[Embeddings, float], Pairs]] = {"cells": by_cells, "all": all_pairs}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way(rows, similarity)
            times[name].append(time.perf_counter() - start)
    told = "; ".join(
        f"{name} {np.median(all_s):.2f} s ({min(all_s):.2f} to {max(all_s):.2f})"
        for name, all_s in times.items()
    )
    ratios = np.array(times["cells"]) / np.array(times["all"])
    print(
        f"  {told}; ratio {np.median(ratios):.3f} ({ratios.min():.3f} to {ratios.max():.3f}) over"
        f" {rounds} rounds in turn"
    )


def by_cells(rows: Embeddings, similarity: float) -> Pairs:
    search = PairSearch(len(rows), rows.__getitem__, similarity)
    found: Pairs = set()
    for cell in range(search.cells.num_cells):
        for pairs in search.of_cell(cell):
            found |= set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))
    return found


def all_pairs(rows: Embeddings, similarity: float) -> Pairs:
    """Returns the same from the products of all rows, where float32 is unsure by float64."""
    found: Pairs = set()
    for start in range(0, len(rows), TILE):
        left = rows[start : start + TILE]
        for other in range(start, len(rows), TILE):
            near = left @ rows[other : other + TILE].T >= similarity - SLACK
            one, two = (each.astype(np.int64) for each in np.nonzero(near))
            one, two = one + start, two + other
            one, two = one[one < two], two[one < two]
            exact = np.einsum("nd,nd->n", rows[one].astype(float), rows[two].astype(float))
            close = exact >= similarity
            found |= set(zip(one[close].tolist(), two[close].tolist(), strict=True))
    return found


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--rows", "num", default=1_000_000, show_default=True)
@click.option("--dimension", default=256, show_default=True)
@click.option("--similarity", default=0.96, show_default=True)
def synthetic(work: Path, num: int, dimension: int, similarity: float) -> None:
    work.mkdir(parents=True, exist_ok=True)
    path = work / f"rows-{num}-{dimension}.npy"
    copies = make_rows(path, num, dimension)
    rows = np.load(path, mmap_mode="r")
    with peak_memory() as peak, Reporter().stage("search", num) as meter:
        start = time.perf_counter()
        groups = duplicate_groups(num, lambda some: np.asarray(rows[some]), similarity, meter=meter)
        took = time.perf_counter() - start
    together = sum(bool(np.isin(group.rows - 1, group.rows).any()) for group in groups)
    mib = {name: kib / 2**10 for name, kib in peak.items()}
    print(
        f"{num} rows of {dimension} ({path.stat().st_size / 2**20:.0f} MiB), {copies} copies:"
        f" {len(groups)} groups, {together} of them with a copy, in {took:.0f} s"
    )
    print(
        f"  peak of memory above the start: its own {mib['RssAnon']:.0f} MiB, with mapped files"
        f" {mib['VmRSS']:.0f} MiB"
    )


def make_rows(path: Path, num: int, dimension: int) -> int:
    """Writes unit rows around random directions, and returns the number of near copies: each
    hundredth row is one of the row before it.
    """
    if path.exists():
        return num // 100
    things = np.random.default_rng(0).standard_normal((num // 200, dimension)).astype(np.float32)
    made = np.lib.format.open_memmap(path, "w+", np.float32, (num, dimension))
    for start in range(0, num, 10_000):
        rng = np.random.default_rng(start)
        noise = rng.standard_normal((10_000, dimension), dtype=np.float32)
        block = things[rng.integers(0, len(things), 10_000)] + 0.8 * noise
        copied = np.arange(99, 10_000, 100)
        block[copied] = block[copied - 1] + 0.1 * noise[copied]
        made[start : start + 10_000] = block / np.linalg.norm(block, axis=1, keepdims=True)
    made.flush()
    return num // 100


@contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """Yields what becomes the peaks above the start in KiB: RssAnon, and VmRSS with mapped
    files.
    """
    start, peak, ended = memory(), dict.fromkeys(("RssAnon", "VmRSS"), 0), threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            for name, now in memory().items():
                peak[name] = max(peak[name], now - start[name])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield peak
    ended.set()
    thread.join()


def memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return {name: int(values[name].split()[0]) for name in ("RssAnon", "VmRSS")}


if __name__ == "__main__":
    main()
