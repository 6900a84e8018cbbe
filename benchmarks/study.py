"""Three losses on one small tower, in slices that fit a loan of a GPU; rows add up to a table.

    python -m benchmarks.study --pack DATA  here: writes .study, all that the other machine needs
    python -m benchmarks.study              there: one slice; appends rows to results/study.jsonl
    python -m benchmarks.study --table      the table of all rows so far

DATA has tiny_imagenet_pretrain, tiny_imagenet_30 and encoders. A pack holds 8,000 photographs with
labels for three seeds that have no rows yet, each clustered anew with its seed from features of
MobileNetV2, and 150 photographs of each of 30 classes that no tower sees. It is as small as what
may travel to a lent machine.

A slice trains CD, MLC and MLCD for each seed by the recipe `small` with scale 16. It first times a
short run, then gives all trainings of a seed the same number of steps, as many as fit the time that
is left and at most --steps. A training that exceeds its share of that time is stopped after a step,
and its seed is left out. The measure is the accuracy of 5 neighbors, where each unseen photograph
is asked and all others vote; the linear probe would take longer than the training.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import mlcd
from benchmarks.gpu import RESULTS, ROOT, origin
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.progress import Reporter
from mlcd.training.config import load_config
from mlcd.training.evaluation.report import KnnProtocol, Subject, evaluate_all
from mlcd.training.preemption import Preempted, preemptible
from mlcd.training.run.run_training import run_training
from mlcd.training.telemetry.step_logs import NAME as METRICS

BEGAN: Final = time.perf_counter()
LOSSES: Final = ("cd", "mlc", "mlcd")
SEEDS_EACH: Final = 3  # of a pack
PACK: Final = ROOT / ".study"
ROWS: Final = RESULTS / "study.jsonl"
MAX_PACK_BYTES: Final = 32 * 2**20
STEPS: Final = 1500
_BATCH: Final = 128
_WARMUP_STEPS: Final = 50
_ROUND: Final = 100  # steps, so that slices of one kind of machine agree
_TIMED_STEPS: Final = 40
_MARGIN: Final = 1.2  # of the time of a step
MOBILENET: Final = "encoders/mobilenet_v2_imagenet/mobilenet_v2_1.0_224.onnx"
_PHOTOGRAPHS, _UNSEEN = "photographs.zip", "unseen.zip"
_PROTOCOL: Final = KnnProtocol("embedding", "accuracy", hold_out=0.0, neighbors=5)


@dataclass(frozen=True)
class PackSizes:
    """photographs: to train on. each: photographs of an unseen class."""

    photographs: int
    clusters: int
    each: int


def pack(data: Path, model: str, out: Path, seeds: Sequence[int], sizes: PackSizes) -> None:
    """Writes photographs and labels by the features of `model`.

    Raises SystemExit if they are too large to travel.
    """
    source = open_source(str(data / "tiny_imagenet_pretrain" / "pretrain-*.tar"))
    unseen = open_source(str(data / "tiny_imagenet_30"))
    by_class = defaultdict(list)
    for index, name in enumerate(unseen.entries.class_names()):
        by_class[str(name).rpartition("/")[2]].append(index)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        files = work / "pack"
        files.mkdir()
        chosen = _spread(range(len(source.entries)), sizes.photographs)
        _write_zip(files / _PHOTOGRAPHS, source, {"": chosen})
        classes = {f"{name}/": _spread(rows, sizes.each) for name, rows in by_class.items()}
        _write_zip(files / _UNSEEN, unseen, classes)
        mlcd.embed(files / _PHOTOGRAPHS, model=model, out=work / "features")
        for seed in seeds:
            options = {"subtract_mean": True, "hold_out": 0.0, "out": work / f"centers-{seed}"}
            mlcd.cluster(work / "features", sizes.clusters, seed=seed, **options)
            labels = files / f"labels-{seed}"
            mlcd.label(work / "features", work / f"centers-{seed}", out=labels)
        size = sum(path.stat().st_size for path in files.rglob("*") if path.is_file())
        if size > MAX_PACK_BYTES:
            raise SystemExit(f"a pack must have at most {MAX_PACK_BYTES} bytes, got {size}")
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(files, out)
    print(f"{out}: seeds {', '.join(map(str, seeds))}, {size / 2**20:.1f} MiB")


def _spread(rows: Sequence[int], num: int) -> Sequence[int]:
    """Returns `num` rows, or all, at equal distances."""
    return [rows[index * len(rows) // num] for index in range(num)] if num < len(rows) else rows


def _write_zip(path: Path, source: Source, rows: dict[str, Sequence[int]]) -> None:
    """Stores the files of images, numbered, below their folder."""
    with zipfile.ZipFile(path, "w") as archive:
        for folder, indices in rows.items():
            for index in indices:
                archive.writestr(f"{folder}{index:06d}.jpg", source.read(source.entries[index]))


@dataclass(frozen=True)
class Slice:
    """A slice of the study. deadline: of `time.perf_counter`."""

    packed: Path
    work: Path
    device: str
    steps: int
    deadline: float

    def left_s(self) -> float:
        return self.deadline - time.perf_counter()

    def train(self, out: Path, loss: str, seed: int, steps: int, limit_s: float) -> Path:
        """Trains a tower, and returns the run. Raises Preempted after a step beyond the limit."""
        config = load_config(
            "small",
            [
                f"loss.kind={loss}",
                "loss.scale=16",
                f"out={out}",
                f"seed={seed}",
                f"device={self.device}",
                f"data.images={self.packed / _PHOTOGRAPHS}",
                f"data.labels={self.packed / f'labels-{seed}'}",
                f"schedule={{steps: {steps}, batch_size: {_BATCH}}}",
                f"optim.warmup_steps={min(_WARMUP_STEPS, steps)}",
                f"checkpoint.every_steps={steps}",
                "telemetry.peak_tflops=1.0",  # measuring it takes time
            ],
        )
        with preemptible():
            timer = threading.Timer(limit_s, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            try:
                run_training(config, Reporter("silent"))
            finally:
                timer.cancel()
                timer.join()
        return out

    def measure(self, run: Path) -> float:
        """Returns the accuracy on the unseen classes."""
        (record,) = evaluate_all(
            [run],
            _PROTOCOL,
            Subject(str(self.packed / _UNSEEN)),
            out=None,
            reporter=Reporter("silent"),
            device=torch.device(self.device),
        )
        return float(record["metrics"]["knn_accuracy"])

    def rows(self, seeds: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
        """Yields the rows of each seed whose trainings all end."""
        began, timed = time.perf_counter(), min(self.steps, _TIMED_STEPS)
        try:
            run = self.train(self.work / "timed", LOSSES[-1], seeds[0], timed, self.left_s())
        except Preempted:
            return
        self.measure(run)
        step_s = _step_seconds(run)
        other_s = time.perf_counter() - began - timed * step_s  # with what only a first run does
        print(f"a step takes {1000 * step_s:.1f} ms, a run {other_s:.1f} s besides", flush=True)
        for number, seed in enumerate(seeds):
            num_runs = len(LOSSES) * (len(seeds) - number)
            share_s = self.left_s() / num_runs
            steps = steps_that_fit(share_s - other_s, step_s, self.steps)
            if steps == 0:
                print(f"seed {seed}: left out, {self.left_s():.0f} s are left", flush=True)
                continue
            yield from self._rows_of(seed, steps, share_s)

    def _rows_of(self, seed: int, steps: int, share_s: float) -> Iterator[list[dict[str, Any]]]:
        rows = []
        for loss in LOSSES:
            began = time.perf_counter()
            try:
                run = self.train(self.work / f"{loss}-{seed}", loss, seed, steps, share_s)
            except Preempted as stop:
                made = f"{loss} made {stop.step or 0} of {steps} steps"
                print(f"seed {seed}: left out, {made} in {share_s:.0f} s", flush=True)
                return
            train_s = round(time.perf_counter() - began, 1)
            row = {"loss": loss, "seed": seed, "steps": steps, "knn": self.measure(run)}
            rows.append(row | {"train_s": train_s, **origin()})
            print(json.dumps(rows[-1]), flush=True)
        yield rows


def _step_seconds(run: Path) -> float:
    """Returns the time of a step in the last window of a run's log."""
    last = json.loads((run / METRICS).read_text().splitlines()[-1])
    return float(_BATCH / last["images_per_s"])


def steps_that_fit(seconds: float, step_s: float, most: int) -> int:
    """Returns how many steps of a training fit, rounded down to hundreds below `most`."""
    fit = int(seconds / (_MARGIN * step_s))
    return most if fit >= most else max(0, fit // _ROUND * _ROUND)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Returns mean and standard deviation in percent, for each loss and number of steps."""
    groups = defaultdict(list)
    named = {tuple(row[name] for name in ("device", "steps", "loss", "seed")): row for row in rows}
    for row in named.values():  # a seed counts once
        groups[row["device"], row["steps"], row["loss"]].append(row)
    lines = [
        f"{sum(map(len, groups.values()))} rows",
        "| device | steps | loss | seeds | 5 neighbors, % |",
        "|---|---:|---|---:|---:|",
    ]
    for (device, steps, loss), group in sorted(groups.items()):
        values = [100 * row["knn"] for row in group]
        deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        cells = (device, steps, loss, len(values), f"{statistics.mean(values):.1f}{deviation}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", type=Path, metavar="DATA")
    parser.add_argument("--model", help="of the features  [default: MobileNetV2 of DATA]")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--packed", type=Path, default=PACK)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--photographs", type=int, default=8000)
    parser.add_argument("--clusters", type=int, default=500)
    parser.add_argument("--each", type=int, default=150)
    options = parser.parse_args()
    rows = read_rows(options.rows)
    if options.pack is not None:
        first = max((row["seed"] for row in rows), default=0) + 1
        sizes = PackSizes(options.photographs, options.clusters, options.each)
        model = options.model or str(options.pack / MOBILENET)
        pack(options.pack, model, options.packed, range(first, first + SEEDS_EACH), sizes)
    elif options.table:
        print(table(rows))
    elif not options.packed.is_dir():
        print(f"left out: {options.packed} is missing: make it by --pack where the data are")
    else:
        perform(options, rows)


def perform(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Trains the seeds of the pack without rows, appends theirs, and prints the table.

    Raises SystemExit if no seed ends in time.
    """
    labels = options.packed.glob("labels-*")
    seeds = {int(path.name.rpartition("-")[2]) for path in labels} - {row["seed"] for row in rows}
    if not seeds:
        print("left out: all seeds of the pack have rows: make another by --pack")
        return
    deadline, num_before = BEGAN + 60 * options.minutes, len(rows)
    with tempfile.TemporaryDirectory() as work, options.rows.open("a") as file:
        part = Slice(options.packed, Path(work), options.device, options.steps, deadline)
        for rows_of_seed in part.rows(sorted(seeds)):
            rows += rows_of_seed
            file.write("".join(json.dumps(row) + "\n" for row in rows_of_seed))
            file.flush()
    if len(rows) == num_before:
        raise SystemExit("no seed ended in time: give --minutes more, or --steps fewer")
    print(table(rows))


if __name__ == "__main__":
    main()
