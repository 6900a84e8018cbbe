"""The suite on real photographs: the sets at hand, three models, one report.

    python -m benchmarks.suite WORK

lays out the data sets below WORK/sets, makes the models, each by public commands, and ends with

    mlcd evaluate suite --data WORK/sets --model WORK/demo/run --model starter
        --model WORK/products/lit --out WORK/report

run      the tower of `mlcd demo`, trained on clusters of scikit-learn's digits
starter  the starter
lit      a tower that `mlcd train small` has trained on clusters of 2,358 photographs of products,
         and a text tower that learned their names beside it

Of CIFAR-10 and Tiny ImageNet the first 50 images of each class and part are taken. What is finished
is not made again, so the same command goes on after an interruption.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.lit import BATCH, DATA, FLAT, OPTIM, TEXTS, train_tower, write_split
from mlcd.demo import write_digits

SHARED: Final = DATA.parent
_LEAST: Final = 40  # photographs of an article that is a class
_NUMBERS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def mlcd(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "mlcd", *map(str, arguments)], check=True)


def write_sets(sets: Path, most: int) -> None:
    """Lays out the data sets: folders, and tables with `most` images of each class and part."""
    (sets / "splits").mkdir(parents=True)
    (sets / "caltech101_20").symlink_to(SHARED / "caltech101_20")
    write_digits(sets / "digits")
    write_names(sets, "digits", {str(n): name for n, name in enumerate(_NUMBERS)})
    both = {"train": "train", "test": "test"}
    write_tables(SHARED / "cifar10_jpg", sets / "cifar10_jpg", most, both)
    write_products(sets / "fashion_articles")
    tiny = SHARED / "tiny_imagenet_30"
    write_tables(tiny, sets / "tiny_imagenet_30", most, parts={"train": "train", "val": "test"})
    with (tiny / "classes.csv").open() as file:
        first = {row["wnid"]: row["name"].split(",")[0] for row in csv.DictReader(file)}
    write_names(sets, "tiny_imagenet_30", first)


def write_tables(folder: Path, out: Path, most: int, parts: dict[str, str]) -> None:
    """Writes parts of a folder as tables, the first images of each class. parts: their names here,
    and as the suite reads them.
    """
    out.mkdir()
    for part, name in parts.items():
        kinds = sorted(path for path in (folder / part).iterdir() if path.is_dir())
        files = [file for kind in kinds for file in sorted(kind.iterdir())[:most]]
        write_table(out / f"{name}.parquet", [(file, file.parent.name) for file in files])


def write_table(out: Path, images: Sequence[tuple[Path, str]]) -> None:
    columns = {"image": [path.read_bytes() for path, _ in images], "label": [c for _, c in images]}
    pq.write_table(pa.table(columns), out, row_group_size=100)


def write_names(sets: Path, name: str, names: dict[str, str]) -> None:
    (sets / "splits" / f"{name}.json").write_text(json.dumps({"names": names}))


def write_products(folder: Path) -> None:
    folder.mkdir()
    with (DATA / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    num = Counter(row["articleType"] for row in rows)
    for part in ("train", "test"):
        chosen = [row for row in rows if row["split"] == part and num[row["articleType"]] >= _LEAST]
        images = [(DATA / row["path"], row["articleType"]) for row in chosen]
        write_table(folder / f"{part}.parquet", images)


def train_lit(work: Path, steps: int) -> Path:
    """Trains a text tower beside the tower of `benchmarks/lit.py`."""
    write_split(work / "train", "train")
    places = (f"model.start={train_tower(work)}", f"data.pairs={work / 'train'}")
    length = (f"schedule.batch_size={BATCH}", f"schedule.steps={steps}", f"out={work / 'lit'}")
    mlcd("train", "lit", *FLAT, *OPTIM, *TEXTS["small"], *places, *length)
    return work / "lit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=100, help="of the text tower")
    parser.add_argument("--most", type=int, default=50, help="images a class and part of two sets")
    options = parser.parse_args()
    work = options.work
    if not (work / "sets").exists():
        write_sets(work / "sets", options.most)
    mlcd("demo", "--no-serve", "--out", work / "demo")
    models = (work / "demo" / "run", "starter", train_lit(work / "products", options.steps))
    chosen = [part for model in models for part in ("--model", model)]
    mlcd("evaluate", "suite", "--data", work / "sets", *chosen, "--out", work / "report")


if __name__ == "__main__":
    main()
