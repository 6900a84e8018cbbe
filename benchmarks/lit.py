"""Training on pairs: LiT over cached embeddings against the live image tower, and what is learned.

    python benchmarks/lit.py speed [--steps 4] [--text small|clip] [--out FILE.json]
    python benchmarks/lit.py learn [--steps 200] [--only lit …] [--work DIR] [--out FILE.json]

`speed` trains a text tower beside ViT-B/32 with random weights, at the same settings from cached
embeddings and from decoded crops, in turns, and gives the steps per second of each.

`learn` trains on 2,358 photographs of products with their names. On the 642 that are kept
apart it measures, by `mlcd evaluate`: R@5 both ways, and zero-shot among the kinds of articles. It
compares

  lit            a text tower beside a frozen tower, which `mlcd train small` has trained on
                 clusters of the same photographs
  clip, siglip   both towers from scratch, of the same sizes
  siglip-scale   siglip from clip's scale of 1 / 0.07
  siglip-bias    siglip from a bias of -10, which the paper takes for a batch of 32,768

The others train in so many steps, lit in four times as many, which take it less time. With --work,
what is done stays there, and the same command goes on.
"""

import argparse
import contextlib
import csv
import io
import json
import math
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlcd.cli import cli
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import Servable
from mlcd.models.vit import ViT, ViTConfig
from mlcd.progress import Reporter
from mlcd.training.pairs.pairs_config import load_any_config
from mlcd.training.run.run_files import run_directory
from mlcd.training.run.run_pairs import run_pairs

DATA = Path(__file__).resolve().parents[2] / "shared/data/fashion_products"
SILENT = Reporter("silent")
TURNS = 3
BATCH = 128
LIT_STEPS = 4  # for each of the others
ARMS = {
    "lit": ("lit",),
    "clip": ("clip",),
    "siglip": ("siglip",),
    "siglip-scale": ("siglip", f"loss.scale={1 / 0.07}"),
    "siglip-bias": ("siglip", "loss.bias=-10"),
}
TEXTS = {
    "small": ("text.width=128", "text.depth=2", "text.heads=4", "text.context_length=32"),
    "clip": (),
}
SIDE = 32
TOWER = (
    f"model.image_size={SIDE}",
    "model.patch_size=8",
    "model.width=128",
    "model.depth=4",
    "model.heads=4",
    "model.mlp_width=384",
    "model.embedding_dim=128",
)
OPTIM = ("optim.lr=1e-3", "optim.weight_decay=0.2", "optim.clip_norm=1.0")
FLAT = ("optim.warmup_steps=20", "compute.precision=fp32", "checkpoint.every_steps=100")


def write_split(folder: Path, split: str, most: int | None = None) -> list[str]:
    """Copies the photographs of a split with their captions into a folder for each kind of article;
    returns the kind of each. most: of the photographs, the first ones.
    """
    with (DATA / "labels.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split][:most]
    if not folder.exists():
        lines = []
        for row in rows:
            path = Path(row["articleType"].replace("/", " ")) / Path(row["path"]).name
            (folder / path.parent).mkdir(parents=True, exist_ok=True)
            shutil.copy(DATA / row["path"], folder / path)
            lines.append(json.dumps({"path": path.as_posix(), "caption": row["caption"]}))
        (folder / "captions.jsonl").write_text("\n".join(lines) + "\n")
    return [row["articleType"] for row in rows]


def mlcd(*arguments: object) -> Any:
    """Runs a command in this process; returns what it reports."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        cli.main([*map(str, arguments), "--json"], standalone_mode=False)
    return json.loads(said.getvalue().splitlines()[-1])


def train_tower(work: Path) -> Path:
    """Trains a tower on clusters of the photographs, by the public commands."""
    if (work / "tower").exists():
        return work / "tower"
    images = work / "train"
    mlcd("embed", images, work / "features", "--model", "hog")
    mlcd("cluster", work / "features", work / "centers", "--clusters", 100)
    mlcd("label", work / "features", work / "labels", "--centers", work / "centers", "--top", 4)
    settings = (f"model.image_size={SIDE}", "loss.labels_per_image=4", "schedule.steps=300")
    settings = (*settings, "schedule.batch_size=64")
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


def train(recipe: str, *settings: str) -> Path:
    """Returns a finished run."""
    return run_pairs(load_any_config(recipe, [*FLAT, *settings]), SILENT).path


def logged(run: Path) -> list[dict[str, Any]]:
    lines = (run_directory(run) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def speed(work: Path, steps: int, text: str) -> dict[str, Any]:
    """Returns the steps per second from cached embeddings and with the live tower."""
    batch = 32
    write_split(work / "train", "train", 4 * batch)
    common = (
        f"data.pairs={work / 'train'}",
        f"model.start={random_tower(work / 'start')}",
        f"schedule.batch_size={batch}",
        "optim.warmup_steps=1",
        *TEXTS[text],
    )
    cached = ("data.cache=true", f"data.embeddings={work / 'embeddings'}")
    rates: dict[str, list[float]] = {"cached": [], "live": []}
    for turn in range(TURNS):
        for name, num, own in (
            ("cached", 10 * steps, cached),
            ("live", steps, ("data.cache=false",)),
        ):
            # The first half holds what is done once.
            settings = (
                f"out={work / name}-{turn}",
                f"schedule.steps={2 * num}",
                f"log_every={num}",
            )
            run = train("lit", *common, *own, *settings)
            rates[name].append(logged(run)[-1]["images_per_s"] / batch)
    ratios = [fast / slow for fast, slow in zip(rates["cached"], rates["live"], strict=True)]
    return {
        **{name: float(np.median(found)) for name, found in rates.items()},
        "ratio": float(np.median(ratios)),
        "ratios": ratios,
        "batch": batch,
        "text": text,
        "load": os.getloadavg(),
    }


def measured(run: Path, work: Path, kinds: list[str]) -> dict[str, Any]:
    """Returns the figures on the photographs kept apart, with their intervals, and by how many
    standard errors of chance each is above chance.
    """
    model, num = work / f"{run.name}-model", len(kinds)
    mlcd("export", run, model)
    (work / "prompt.txt").write_text("{}\n")
    most = max(Counter(kinds).values()) / num
    found = {}
    for name, chances, options in (
        (
            "retrieval",
            {"image_to_text_r@5": 5 / num, "text_to_image_r@5": 5 / num},
            (),
        ),
        ("zero-shot", {"zero_shot_top1": most}, ("--prompts", work / "prompt.txt")),
    ):
        (record,) = mlcd("evaluate", name, model, "--test", work / "test", *options)["results"]
        for metric, chance in chances.items():
            value, error = record["metrics"][metric], math.sqrt(chance * (1 - chance) / num)
            found[metric] = {
                "value": value,
                "interval": record["intervals"][metric],
                "chance": chance,
                "above": (value - chance) / error,
            }
    return found


def processor_s() -> float:
    """Returns the processor time of this process and of those that it has started."""
    return sum(os.times()[:4])


def learn(work: Path, steps: int, names: list[str]) -> dict[str, Any]:
    """Returns what each training has learned."""
    write_split(work / "train", "train")
    kinds = write_split(work / "test", "test")
    results: dict[str, Any] = {"pairs": len(kinds)}
    common = (
        f"data.pairs={work / 'train'}",
        f"schedule.batch_size={BATCH}",
        *OPTIM,
        "log_every=10",
    )
    for name in names:
        began = processor_s()
        own = (f"schedule.steps={steps}", *TOWER)
        if name == "lit":
            own = (f"schedule.steps={LIT_STEPS * steps}", f"model.start={train_tower(work)}")
        run = train(*ARMS[name], *common, *TEXTS["small"], *own, f"out={work / name}")
        results[name] = {
            "processor_s": processor_s() - began,
            "last": logged(run)[-1],
            **measured(run, work, kinds),
        }
        print(name, json.dumps(results[name]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["speed", "learn"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--text", choices=TEXTS, default="small")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        found = (
            speed(work, options.steps or 4, options.text)
            if options.what == "speed"
            else learn(work, options.steps or 200, options.only)
        )
    text = json.dumps(found, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
