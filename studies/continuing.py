"""The study of training on: a tower that goes on against one from scratch, two rounds against one,
fine-tuning against its own probe.

    python -m studies.continuing --data DIR [--size cpu|toy] [--out DIR] [--results FILE]

For each seed a small tower learns clusters of tiny_imagenet_pretrain (MobileNetV2 features, 1,000
clusters, 8 labels), and is measured on the 30 classes of tiny_imagenet_30, which it never saw:

  scratch       N steps (150 of 64 images; two blocks of width 96)
  continued     N steps more from `scratch`, with its head
  second-round  N steps more from `scratch`, on clusters of its own features (`--rounds 2`)
  scratch-long  2 N steps in one go
  fine-tuned    F = 100 steps from `scratch-long` on the classes of tiny_imagenet_30, by `finetune`
  supervised    F steps on the same classes from random weights
  tuned-longer  4 F steps from `scratch-long`

Measures: 5 nearest neighbors by the embedding, a linear probe of the features before the
projection, and for the last three the tower's own classifier (`own_head`). Every artifact is made
by a command of the product in one thread; what exists is kept, so the same call goes on where it
was.
The figures of all finished seeds are written to FILE, with paired 95 % t-intervals.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from mlcd.artifacts.centers import Centers
from mlcd.errors import MlcdError
from mlcd.models.runs import find_checkpoint
from mlcd.models.servable import Servable
from studies.losses.arms import Variant
from studies.losses.data import PretrainingData, make, require
from studies.losses.hardware import origin_so_far
from studies.losses.measure import Rows, encode, linear_probe, measure_neighbors
from studies.losses.sets import SINGLE_LABEL, EvaluationSet, open_sets, pixels
from studies.losses.statistics import in_points, paired_difference
from studies.losses.tiers import TIERS, Tier

RESULTS: Final = Path(__file__).resolve().parent / "losses" / "results" / "continuing.json"
_LEARNED: Final = "tiny_imagenet_pretrain"
_JUDGED: Final = SINGLE_LABEL[0]
_TASK: Final = "label"
_CLASSIFIERS: Final = ("fine-tuned", "supervised", "tuned-longer")


@dataclass(frozen=True)
class Size:
    """The size of the study. steps: N. tuning_steps: F. overrides: of towers from scratch."""

    tier: Tier
    steps: int
    tuning_steps: int
    warmup_steps: int
    batch_size: int
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]


SIZES: Final = {
    "cpu": Size(
        tier=TIERS["cpu"],
        steps=150,
        tuning_steps=100,
        warmup_steps=20,
        batch_size=64,
        seeds=(1, 2, 3, 4),
        overrides=("model.width=96", "model.depth=2", "model.heads=3", "model.mlp_width=288"),
    ),
    "toy": Size(  # the tests run it
        tier=TIERS["toy"],
        steps=4,
        tuning_steps=2,
        warmup_steps=1,
        batch_size=32,
        seeds=(1, 2),
        overrides=tuple(each for each in TIERS["toy"].overrides if each.startswith("model.")),
    ),
}

# One run less another, each by one of its measures.
Sides = tuple[tuple[str, str], tuple[str, str]]
QUESTIONS: Final[Mapping[str, Sides]] = {
    f"{one} - {other}, {measure}": ((one, measure), (other, measure))
    for one, other in (
        ("continued", "scratch"),
        ("continued", "scratch-long"),
        ("second-round", "continued"),
        ("second-round", "scratch-long"),
        ("fine-tuned", "supervised"),
        ("tuned-longer", "scratch-long"),
    )
    for measure in ("knn", "probe")
} | {
    "fine-tuned by its head - probe of the tower before": (
        ("fine-tuned", "own_head"),
        ("scratch-long", "probe"),
    ),
    "tuned longer by its head - probe of the tower before": (
        ("tuned-longer", "own_head"),
        ("scratch-long", "probe"),
    ),
    "fine-tuned - supervised, own_head": (("fine-tuned", "own_head"), ("supervised", "own_head")),
}


@dataclass(frozen=True)
class Continuing:
    """The directories of a study. data: the shared data sets. state: all that it makes."""

    size: Size
    data: Path
    state: Path

    @property
    def pretraining(self) -> PretrainingData:
        return PretrainingData(self.data, self.state, self.size.tier)

    @property
    def known_images(self) -> Path:
        return self.data / _JUDGED / "train"

    @property
    def class_labels(self) -> Path:
        return self.state / "classes"

    def judged(self) -> EvaluationSet:
        return next(open_sets(self.data, self.state, self.size.tier))

    def prepare(self) -> None:
        self.pretraining.prepare(Variant())
        make(self.class_labels, "label", self.known_images, self.class_labels, "--classes")

    def runs(self, seed: int) -> Iterator[tuple[str, Path]]:
        """Makes the runs of a seed, and yields their names and paths."""
        folder, size = self.state / f"seed-{seed}", self.size
        rounds = folder / "rounds"
        source, second = (rounds / f"round-{number}" / "run" for number in (1, 2))
        self._train(second, "small", seed, *size.overrides, rounds=rounds)
        yield "scratch", source
        yield "second-round", second
        tower = f"model={{start: {source}, head: kept}}"
        yield "continued", self._train(folder / "continued", "small", seed, tower)
        long = f"schedule.steps={2 * size.steps}"
        whole = self._train(folder / "scratch-long", "small", seed, *size.overrides, long)
        yield "scratch-long", whole
        tower = f"model={{start: {whole}, head: new, drop_path: 0.1}}"
        yield "fine-tuned", self._train(folder / "fine-tuned", "finetune", seed, tower)
        sizes = _tower_fields(whole)
        yield "supervised", self._train(folder / "supervised", "finetune", seed, sizes)
        longer = f"schedule.steps={4 * size.tuning_steps}"
        run = self._train(folder / "tuned-longer", "finetune", seed, tower, longer)
        yield "tuned-longer", run

    def _train(
        self, run: Path, recipe: str, seed: int, *overrides: str, rounds: Path | None = None
    ) -> Path:
        """Makes a run. rounds: the directory of the two rounds, of which `run` is the second."""
        size, pretraining = self.size, self.pretraining
        if recipe == "finetune":
            data = [f"data.images={self.known_images}", f"data.labels={self.class_labels}"]
            # The average is over the last 50 steps, as the run is short.
            data += ["data.hold_out=0", "optim.ema=0.98", "optim.lr=1e-3"]
        else:
            labels = pretraining.prepare(Variant())
            data = [f"data.images={pretraining.images}", f"data.labels={labels}"]
        steps = size.tuning_steps if recipe == "finetune" else size.steps
        common = [
            f"out={rounds or run}",
            f"seed={seed}",
            "num_threads=1",
            "device=cpu",
            "telemetry.peak_tflops=1.0",  # measuring it takes a second
            f"schedule.steps={steps}",
            f"optim.warmup_steps={size.warmup_steps}",
            f"schedule.batch_size={size.batch_size}",
        ]
        twice = [] if rounds is None else ["--rounds", 2]
        make(run, "train", recipe, *twice, *common, *data, *overrides)
        return run

    def measured(self, seed: int) -> dict[str, dict[str, float]]:
        """Returns each run's measures; those of a finished run are read."""
        figures = {}
        for name, run in self.runs(seed):
            path = self.state / f"seed-{seed}" / f"{name}.json"
            if not path.is_file():
                found = measures(self.judged(), self.state, run, has_head=name in _CLASSIFIERS)
                written = path.with_suffix(".partial")
                written.write_text(json.dumps(found))
                written.rename(path)
            figures[name] = json.loads(path.read_text())
            print(f"seed {seed}: {name} {figures[name]}", flush=True)
        return figures


def _tower_fields(run: Path) -> str:
    """Returns the override that gives a random tower the sizes of a run's."""
    config = Servable.read(find_checkpoint(run) / "weights").trunk.config.to_dict()
    names = ("image_size", "patch_size", "width", "depth", "heads", "mlp_width", "embedding_dim")
    return f"model={json.dumps({**{name: config[name] for name in names}, 'drop_path': 0.1})}"


def measures(judged: EvaluationSet, state: Path, run: Path, *, has_head: bool) -> dict[str, float]:
    """Returns the accuracies of a run's tower on the test images of the set."""
    checkpoint = find_checkpoint(run)
    model = Servable.read(checkpoint / "weights")
    rows = encode(model, pixels(judged, state, model.preprocess.crop))
    (neighbors,) = measure_neighbors(judged, rows)
    found = {"knn": neighbors.value}
    found["probe"] = linear_probe(judged.samples(_TASK, rows.features))
    if has_head:
        found["own_head"] = own_head(judged, rows, Centers.open(checkpoint / "centers"))
    return found


def own_head(judged: EvaluationSet, rows: Rows, centers: Centers) -> float:
    """Returns the share of test images whose nearest class center is that of their class."""
    assert centers.names is not None
    nearest = (rows.embedding[judged.test] @ centers.vectors.T).argmax(axis=1)
    classes = np.array(judged.columns[_TASK])[judged.test]
    return float((np.array(centers.names)[nearest] == classes).mean())


def summary(figures: Mapping[int, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Returns the paired differences of all questions, with 95 % t-intervals over seeds."""
    found = {}
    for question, ((one, measure), (other, by)) in QUESTIONS.items():
        ours = {seed: runs[one][measure] for seed, runs in figures.items()}
        theirs = {seed: runs[other][by] for seed, runs in figures.items()}
        difference = paired_difference(ours, theirs)
        found[question] = {**asdict(difference), "points": in_points(difference)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--out", type=Path, default=Path("continuing"), help="state")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = SIZES[options.size]
    study = Continuing(size, options.data.resolve(), options.out.resolve())
    figures: dict[int, dict[str, dict[str, float]]] = {}
    try:
        require(study.data, [_LEARNED, _JUDGED])
        study.state.mkdir(parents=True, exist_ok=True)
        origin = origin_so_far(study.state / "origin.json")
        study.prepare()
        for seed in size.seeds:
            figures[seed] = study.measured(seed)
            facts = {
                "origin": origin.to_dict(),
                "size": {**asdict(size), "tier": size.tier.name},
                "figures": figures,
                "differences": summary(figures),
            }
            options.results.write_text(json.dumps(facts, indent=1) + "\n")
    except MlcdError as error:
        print(error, file=sys.stderr)
        return 2
    for question, found in summary(figures).items():
        print(f"{question}: {found['points']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
