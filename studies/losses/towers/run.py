"""One run of the towers tier: labels of a teacher, a tower trained from pixels, every image asked.

Shapes: N images.
"""

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.disk import hold_lock
from mlcd.keys import HELD_OUT_FRACTION, mask_held_out, split_positions
from mlcd.models.runs import find_checkpoint
from mlcd.models.servable import Servable
from mlcd.progress import Reporter
from mlcd.training.config import RunConfig, load_config
from mlcd.training.run.run_training import run_training
from mlcd.training.telemetry.step_logs import NAME as METRICS
from studies.losses.data import make
from studies.losses.frozen.features import PRETRAINING, SHARDS, Features
from studies.losses.instrument.asked import ASKED, HELD_OUT, Asked, neighbors_right, probe
from studies.losses.instrument.photographs import Photographs, classes_of, numbered
from studies.losses.instrument.rows import Outcome
from studies.losses.measure import encode
from studies.losses.towers.arms import TowerRun, TowerSize, first_round

_LAST_POINTS: Final = 5  # of the curve; a single batch is too few to show where it ends
_SCALARS: Final = ("scale", "bias")


@dataclass(frozen=True)
class Towers:
    """The directories: features are those of the frozen tier, state has all that is made besides.

    A teacher's labels have a k-means seed of their own in every run's seed.
    """

    features: Features
    state: Path
    size: TowerSize

    @property
    def images(self) -> str:
        return str(self.features.data / SHARDS)

    def labels(self, run: TowerRun) -> Path:
        """Returns the labels that a run trains with, made where they are missing."""
        folder = self.state / "labels" / run.teacher / f"seed{run.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        centers, labels = folder / "centers", folder / "labels"
        with hold_lock(folder / ".making"):
            rows = self._features(run.teacher, run.seed, folder)
            options = ("--clusters", self.size.clusters, "--seed", run.seed, "--subtract-mean")
            make(centers, "cluster", rows, centers, *options, "--hold-out", HELD_OUT_FRACTION)
            make(labels, "label", rows, labels, "--centers", centers)
        return labels

    def _features(self, teacher: str, seed: int, folder: Path) -> Path:
        if teacher != "own":
            return self.features.embed(teacher, PRETRAINING).artifact.path
        model, rows = folder / "model", folder / "features"
        trained = self.trained(first_round(seed))
        make(model, "export", trained, model, "--images", self.images)
        make(rows, "embed", self.images, rows, "--model", model)
        return rows

    def trained(self, run: TowerRun) -> Path:
        """Trains the tower of a run, or goes on with it, and returns the finished training."""
        folder = self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder / ".training"):
            run_training(self.config(run), Reporter("silent"))
        return folder / "run"

    def folder(self, run: TowerRun) -> Path:
        return self.state / "training" / run.name

    def config(self, run: TowerRun) -> RunConfig:
        """Returns the recipe `small` with the changes of the size and the arm."""
        size = self.size
        return load_config(
            "small",
            [
                *size.overrides,
                *run.arm.overrides,
                f"out={self.folder(run) / 'run'}",
                f"seed={run.seed}",
                f"num_threads={size.num_threads}",
                f"device={size.device}",
                f"data.images={self.images}",
                f"data.labels={self.labels(run)}",
                f"model.image_size={size.image_size}",
                f"schedule.steps={size.steps}",
                f"checkpoint.every_steps={size.checkpoint_steps}",
                "telemetry.peak_tflops=1.0",  # it does not matter here, and measuring it takes time
            ],
        )

    def sets(self) -> "tuple[PhotographSet, ...]":
        """Returns the photographs held out of pre-training, and all of unseen classes."""
        return opened_sets(self.features.data, self.state / "photographs", self.size.image_size)


@dataclass(frozen=True)
class PhotographSet:
    """A set whose every image is asked: pixels uint8 [N, 3, S, S] and classes [N]."""

    name: str
    pixels: NDArray[np.uint8]
    classes: NDArray[np.int64]


@lru_cache(maxsize=1)
def opened_sets(data: Path, state: Path, side: int) -> tuple[PhotographSet, ...]:
    """Opens the sets once in each process; their pixels are decoded where that is not done."""
    return tuple(_open_sets(data, state, side))


def _open_sets(data: Path, state: Path, side: int) -> Iterator[PhotographSet]:
    found = Photographs.open(str(data / SHARDS), state / f"{PRETRAINING}-{side}.npy", side)
    tested = mask_held_out(split_positions(found.keys, found.class_names), HELD_OUT_FRACTION)
    yield PhotographSet(HELD_OUT, found.pixels[tested], numbered(found.class_names)[tested])
    for name in ASKED:
        found = Photographs.open(str(data / name), state / f"{name}-{side}.npy", side)
        classes = classes_of(data / name, found.keys, found.class_names)
        yield PhotographSet(name, found.pixels, classes)


def perform_tower(run: TowerRun, towers: Towers) -> Outcome:
    """Trains and asks; the same run gives the same numbers on one kind of CPU with one thread."""
    began = time.perf_counter()
    towers.labels(run)
    labeled = time.perf_counter()
    trained = towers.trained(run)
    ended = time.perf_counter()
    model = Servable.read(find_checkpoint(trained) / "weights").to(towers.size.device)
    numbers: dict[str, Any] = resting(trained / METRICS)
    right = []
    for each in towers.sets():
        rows = encode(model, each.pixels).embedding
        right.append(neighbors_right(rows, Asked(each.name, rows, each.classes)))
        numbers[f"knn_{each.name}"] = float(right[-1].mean())
        numbers[f"probe_{each.name}"] = probe(rows, each.classes)
    seconds = {
        "cluster_s": labeled - began,
        "train_s": ended - labeled,  # by this process alone, where it was interrupted
        "evaluation_s": time.perf_counter() - ended,
    }
    return Outcome(
        {"train_steps": towers.size.steps, **numbers, **seconds},
        np.concatenate(right),
        None if run == first_round(run.seed) else towers.folder(run),
    )


def resting(metrics: Path) -> dict[str, float]:
    """Returns the mean cosines of the last points of a training's curve, and what was learned."""
    points = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = [point for point in points if point.get("loss") is not None][-_LAST_POINTS:]
    names = ("positive_cosine", "negative_cosine")
    found = {name: statistics.mean(point[name] for point in last) for name in names}
    return found | {f"end_{name}": last[-1][name] for name in _SCALARS if name in last[-1]}


def prepare_towers(towers: Towers) -> None:
    """Decodes the sets, and embeds by the first teacher: others' features are made when needed."""
    towers.sets()
    towers.features.embed("mobilenet", PRETRAINING)
