"""The suite on real photographs: the sets at hand, three models, one report.

    python -m benchmarks.suite WORK

lays out the data sets below WORK/sets, makes the models, each by public commands, and ends with

    mlcd evaluate suite --data WORK/sets --model WORK/demo --model starter --model WORK/lit
        --out WORK/report

demo     the tower of `mlcd demo`, trained on clusters of scikit-learn's digits
starter  the starter
lit      a tower that `mlcd train small` has trained on clusters of 2,358 photographs of products,
         and a text tower that learned their names beside it

What is finished is not made again, so the same command goes on after an interruption.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.lit import DATA, FLAT, TEXT, train_tower, write_split
from mlcd.demo import write_digits

SHARED: Final = DATA.parent
_LEAST: Final = 40  # photographs of an article that is a class
_NUMBERS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def mlcd(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "mlcd", *map(str, arguments)], check=True)


def write_sets(sets: Path) -> None:
    """Lays out the data sets: folders, and the products as two tables in parquet."""
    (sets / "splits").mkdir(parents=True)
    for name in ("caltech101_20", "cifar10_jpg", "tiny_imagenet_30"):
        (sets / name).symlink_to(SHARED / name)
    with (SHARED / "tiny_imagenet_30/classes.csv").open() as file:
        # The first synonym is what people say.
        names = {row["wnid"]: row["name"].split(", ")[0] for row in csv.DictReader(file)}
    write_names(sets, "tiny_imagenet_30", names)
    write_digits(sets / "digits")
    write_names(sets, "digits", {str(n): name for n, name in enumerate(_NUMBERS)})
    write_products(sets / "fashion_articles")


def write_names(sets: Path, name: str, names: dict[str, str]) -> None:
    (sets / "splits" / f"{name}.json").write_text(json.dumps({"names": names}))


def write_products(folder: Path) -> None:
    folder.mkdir()
    with (DATA / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    num = Counter(row["articleType"] for row in rows)
    for part in ("train", "test"):
        chosen = [row for row in rows if row["split"] == part and num[row["articleType"]] >= _LEAST]
        table = pa.table(
            {
                "image": [(DATA / row["path"]).read_bytes() for row in chosen],
                "label": [row["articleType"] for row in chosen],
            }
        )
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=100)


def train_lit(work: Path, steps: int) -> Path:
    """Trains a text tower beside a tower of photographs of products."""
    if not (work / "tower").exists():
        if not (work / "train").exists():
            write_split(work / "train", "train")
        train_tower(work / "train", work)
    settings = ("schedule.batch_size=250", "optim.lr=1e-3", "optim.weight_decay=0.2")
    places = (f"model.start={work / 'tower'}", f"data.pairs={work / 'train'}")
    out = (f"out={work / 'lit'}", f"schedule.steps={steps}", "optim.clip_norm=1.0")
    mlcd("train", "lit", *FLAT, *TEXT, *settings, *places, *out)
    return work / "lit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=150, help="of the text tower")
    options = parser.parse_args()
    work = options.work
    if not (work / "sets").exists():
        write_sets(work / "sets")
    mlcd("demo", "--no-serve", "--out", work / "demo")
    models = (work / "demo" / "run", "starter", train_lit(work / "products", options.steps))
    chosen = [part for model in models for part in ("--model", model)]
    mlcd("evaluate", "suite", "--data", work / "sets", *chosen, "--out", work / "report")


if __name__ == "__main__":
    main()
