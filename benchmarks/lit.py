"""Training on pairs: LiT over cached embeddings against the live image tower, and what is learned.

    python benchmarks/lit.py speed [--steps 30] [--out FILE.json]
    python benchmarks/lit.py learn [--minutes 3] [--out FILE.json]

`speed` trains a text tower beside ViT-B/32 with random weights, at the same settings once from
cached embeddings and once from decoded crops, and gives the steps per second of each.

`learn` trains on 2,358 photographs of products with their names, and retrieves among the 642 that
are kept apart: recall at 1, 5 and 10 of texts by images and of images by texts, with the standard
error of the images and that of chance. It compares

  lit            a text tower beside a frozen tower, which `mlcd train small` has trained on
                 clusters of the same photographs
  clip, siglip   both towers from scratch, of the same sizes

each in as much time. A pair is found if fewer than k others have a higher cosine; those of an equal
one count by half.
"""

import argparse
import csv
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlcd.images.prefetch import prepare_all
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import Servable
from mlcd.models.servable_text import ServableText
from mlcd.models.vit import ViT, ViTConfig
from mlcd.progress import Reporter
from training.pairs.config import load_any_config
from training.pairs.run import run_pairs
from training.run import run_directory

DATA = Path(__file__).resolve().parents[2] / "shared/data/fashion_products"
SILENT = Reporter("silent")
RANKS = (1, 5, 10)
TEXT = ("text.width=128", "text.depth=2", "text.heads=4", "text.context_length=32")
TOWER = (
    "model.image_size=64",
    "model.patch_size=8",
    "model.width=128",
    "model.depth=4",
    "model.heads=4",
    "model.mlp_width=384",
    "model.embedding_dim=128",
)
FLAT = ("optim.warmup_steps=20", "compute.precision=fp32", "checkpoint.every_steps=100000")


def write_split(folder: Path, split: str) -> list[tuple[str, str]]:
    """Copies the photographs of a split with their captions; returns (path, caption) of each."""
    with (DATA / "labels.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split]
    folder.mkdir(parents=True)
    for row in rows:
        shutil.copy(DATA / row["path"], folder / Path(row["path"]).name)
    pairs = [(Path(row["path"]).name, row["caption"]) for row in rows]
    lines = (json.dumps({"path": path, "caption": caption}) for path, caption in pairs)
    (folder / "captions.jsonl").write_text("\n".join(lines) + "\n")
    return pairs


def mlcd(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "mlcd", *map(str, arguments)], check=True)


def train_tower(images: Path, work: Path) -> Path:
    """Trains a tower on clusters of the photographs, by the public commands."""
    mlcd("embed", images, work / "features", "--model", "hog")
    mlcd("cluster", work / "features", work / "centers", "--clusters", 100)
    mlcd("label", work / "features", work / "labels", "--centers", work / "centers", "--top", 4)
    settings = ("loss.labels_per_image=4", "schedule.steps=300", "schedule.batch_size=64")
    places = (f"data.images={images}", f"data.labels={work / 'labels'}", f"out={work / 'tower'}")
    mlcd("train", "small", *settings, *places)
    return work / "tower"


def random_tower(folder: Path) -> Path:
    """Writes ViT-B/32 with random weights."""
    trunk = ViT(ViTConfig(224, 32, 768, 12, 12, 3072, embedding_dim=512))
    trunk.initialize(torch.Generator().manual_seed(0))
    folder.mkdir()
    Servable(trunk, PreprocessSpec(resize_shortest=224, crop=224)).write(folder)
    return folder


def train(recipe: str, *settings: str) -> tuple[Path, float]:
    """Returns a finished run, and the seconds that it took."""
    began = time.perf_counter()
    run = run_pairs(load_any_config(recipe, [*FLAT, *TEXT, *settings]), SILENT)
    return run.path, time.perf_counter() - began


def logged(run: Path) -> list[dict[str, Any]]:
    lines = (run_directory(run) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def speed(work: Path, steps: int) -> dict[str, Any]:
    """Returns the steps per second from cached embeddings and with the live tower."""
    write_split(work / "train", "train")
    start = random_tower(work / "start")
    batch = 64
    common = (
        f"data.pairs={work / 'train'}",
        f"model.start={start}",
        f"schedule.batch_size={batch}",
    )
    rates = {}
    for name, cached, num in (("cached", "true", 20 * steps), ("live", "false", steps)):
        places = (f"out={work / name}", f"data.cache={cached}", f"schedule.steps={num}")
        run, _ = train("lit", *common, *places, f"log_every={num // 3}")
        # The first window holds what is done once.
        windows = [line["images_per_s"] / batch for line in logged(run)[1:3]]
        rates[name] = float(np.median(windows))
    return {**rates, "ratio": rates["cached"] / rates["live"], "batch": batch}


def embed_pairs(
    run: Path, folder: Path, pairs: Sequence[tuple[str, str]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the unit rows of the images and of the texts."""
    checkpoint = max((run / "checkpoints").iterdir())
    images, texts = (
        Servable.read(checkpoint / "weights"),
        ServableText.read(checkpoint / "text"),
    )
    caption_of = dict(pairs)
    source = open_source(str(folder))
    prepared = list(prepare_all(source, source.entries, images.preprocess, num_threads=2))
    pixels = np.stack([each.pixels for each in prepared if each.pixels is not None])
    captions = [caption_of[each.entry.key] for each in prepared]
    with torch.no_grad():
        rows = torch.cat([images(part) for part in torch.from_numpy(pixels).split(64)])
        ids = torch.from_numpy(texts.tokenizer(captions))
        return rows.numpy(), texts(ids).numpy()


def recalls(queries: NDArray[np.float32], others: NDArray[np.float32]) -> dict[str, Any]:
    """Returns the recall at each rank, its standard error, and by how many of chance's it is above
    chance.
    """
    cosines = queries @ others.T
    own = np.diag(cosines)[:, None]
    ranks = (cosines > own).sum(axis=1) + ((cosines == own).sum(axis=1) - 1) / 2
    num = len(queries)
    found: dict[str, Any] = {}
    for rank in RANKS:
        recall, chance = float((ranks < rank).mean()), rank / num
        found[f"R@{rank}"] = {
            "recall": recall,
            "standard_error": math.sqrt(recall * (1 - recall) / num),
            "chance": chance,
            "above": (recall - chance) / math.sqrt(chance * (1 - chance) / num),
        }
    return found


def learn(work: Path, minutes: float) -> dict[str, Any]:
    """Returns what each training has learned."""
    write_split(work / "train", "train")
    pairs = write_split(work / "test", "test")
    began = time.perf_counter()
    tower = train_tower(work / "train", work)
    results: dict[str, Any] = {"tower_s": time.perf_counter() - began, "pairs": len(pairs)}
    common = (f"data.pairs={work / 'train'}", "schedule.batch_size=250", "optim.lr=1e-3")
    common = (*common, "optim.weight_decay=0.2", "optim.clip_norm=1.0", "log_every=10")
    for name, own in (
        ("lit", (f"model.start={tower}",)),
        ("clip", TOWER),
        ("siglip", TOWER),
    ):
        # As many steps as fit into the time, by a run of a few.
        short, _ = train(name, *common, *own, f"out={work / name}-short", "schedule.steps=21")
        rate = logged(short)[-2]["images_per_s"] / 250
        steps = max(21, int(60 * minutes * rate))
        run, seconds = train(name, *common, *own, f"out={work / name}", f"schedule.steps={steps}")
        images, texts = embed_pairs(run, work / "test", pairs)
        results[name] = {
            "steps": steps,
            "seconds": seconds,
            "loss": logged(run)[-1]["loss"],
            "texts_by_images": recalls(images, texts),
            "images_by_texts": recalls(texts, images),
        }
        print(name, json.dumps(results[name]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["speed", "learn"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        found = (
            speed(work, options.steps) if options.what == "speed" else learn(work, options.minutes)
        )
    text = json.dumps(found, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
