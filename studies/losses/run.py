"""One run of the study: it trains an arm, evaluates it and writes result.json."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch

from mlcd.models.runs import find_checkpoint
from mlcd.models.servable import Servable
from mlcd.progress import Reporter
from mlcd.training.config import RunConfig, load_config
from mlcd.training.run.run_training import run_training
from mlcd.training.tower import initial_model
from studies.losses.arms import CLUSTER_ARMS, INSTANCE_ARMS, UNTRAINED, RunSpec, Variant
from studies.losses.data import PretrainingData
from studies.losses.hardware import origin_so_far
from studies.losses.instance import METRICS, InstanceKind, train_instances
from studies.losses.instrument.trainable import trainable
from studies.losses.measure import Measurement, encode, measure, measure_neighbors
from studies.losses.sets import EvaluationSet, open_pretraining, open_sets, pixels
from studies.losses.stopwatch import Stopwatch
from studies.losses.tiers import Tier

RESULT: Final = "result.json"
CURVES: Final = ("loss", "positive_cosine", "negative_cosine")


@dataclass(frozen=True)
class Study:
    """The directories of a study.

    data: the shared data sets. state: everything that the study makes.
    """

    tier: Tier
    data: Path
    state: Path

    @property
    def pretraining(self) -> PretrainingData:
        return PretrainingData(self.data, self.state, self.tier)

    def prepare(self) -> None:
        """Makes everything that runs share, before they start side by side."""
        self.pretraining.prepare(Variant())
        for images in (self.pretraining_set(), *self.evaluation_sets()):
            pixels(images, self.state, self.tier.image_size)

    def pretraining_set(self) -> EvaluationSet:
        return open_pretraining(self.pretraining.images, self.state, self.tier)

    def evaluation_sets(self) -> Iterator[EvaluationSet]:
        return open_sets(self.data, self.state, self.tier)

    def folder(self, spec: RunSpec) -> Path:
        return self.state / "runs" / spec.name

    def is_done(self, spec: RunSpec) -> bool:
        return (self.folder(spec) / RESULT).is_file()

    def scores(self) -> dict[str, float]:
        """Returns the scores of every finished run: see `plan.Scores`."""
        return {result["name"]: _tuning_score(result) for result in self.results()}

    def results(self) -> list[dict[str, Any]]:
        """Returns the results of every finished run, by name."""
        paths = sorted((self.state / "runs").glob(f"*/*/{RESULT}"))
        return [json.loads(path.read_text()) for path in paths]


def perform(study: Study, spec: RunSpec) -> None:
    """Trains, evaluates and writes result.json, or resumes; a finished run stays as it is."""
    if study.is_done(spec):
        return
    folder = study.folder(spec)
    folder.mkdir(parents=True, exist_ok=True)
    origin = origin_so_far(folder / "origin.json")
    config = config_of(study, spec)
    torch.set_num_threads(config.num_threads or torch.get_num_threads())
    training, evaluation = (
        Stopwatch(folder / "training.json"),
        Stopwatch(folder / "evaluation.json"),
    )
    with training:
        model = _trained(config, spec)
    with evaluation:
        measured = [asdict(each) for each in _measured(study, spec, model)]
    result = {
        "name": spec.name,
        "tier": study.tier.name,
        **asdict(spec),
        "threads": config.num_threads,
        "train_s": training.wall_s,
        "train_cpu_s": training.cpu_s,
        "evaluation_s": evaluation.wall_s,
        "origin": origin.to_dict(),
        "measurements": measured,
        "curves": _curves(folder / "run"),
    }
    written = folder / f"{RESULT}.partial"
    written.write_text(json.dumps(result, indent=1) + "\n")
    written.rename(folder / RESULT)


def config_of(study: Study, spec: RunSpec) -> RunConfig:
    """Returns the recipe `small` with the changes of tier, arm, setting and variant.

    Raises InvalidInput as `trainable` does.
    """
    tier, variant = study.tier, spec.variant
    overrides = [
        *tier.overrides,
        f"out={study.folder(spec) / 'run'}",
        f"seed={spec.seed}",
        f"num_threads={tier.num_threads}",
        f"device={tier.device}",
        f"data.images={study.pretraining.images}",
        f"data.labels={study.pretraining.labels(spec)}",
        f"model.image_size={tier.image_size}",
        f"schedule.steps={max(1, spec.steps)}",
        f"optim.lr={spec.setting.lr}",
        *(["optim.warmup_steps=0"] if spec.steps == 0 else []),  # the untrained tower
        f"checkpoint.every_steps={tier.checkpoint_steps}",
        "telemetry.peak_tflops=1.0",  # it does not matter here, and measuring it takes a second
    ]
    if variant.embedding_dim is not None:
        overrides.append(f"model.embedding_dim={variant.embedding_dim}")
    if spec.arm in CLUSTER_ARMS:
        overrides += [
            f"loss.kind={trainable(spec.arm)}",
            f"loss.labels_per_image={spec.num_labels}",
            f"loss.scale={spec.setting.scale}",
            f"loss.negative_ratio={spec.setting.ratio}",
            f"loss.margin_kind={variant.margin_kind}",
            f"loss.bias={variant.bias}",
        ]
    if variant.drawn_from is not None:
        overrides.append(f"loss.drawn_from={variant.drawn_from}")
    if variant.kmeans_centers:
        overrides.append(f"data.centers={study.pretraining.centers(variant)}")
    return load_config("small", overrides)


def _trained(config: RunConfig, spec: RunSpec) -> Servable:
    if spec.arm == UNTRAINED:
        return initial_model(config.model, config.seed)
    if spec.arm in INSTANCE_ARMS:
        return Servable.read(
            train_instances(config, cast("InstanceKind", spec.arm), spec.setting.scale)
        )
    run_training(config, Reporter("silent"))
    return Servable.read(find_checkpoint(Path(config.out)) / "weights")


def _measured(study: Study, spec: RunSpec, model: Servable) -> Iterator[Measurement]:
    tier, state = study.tier, study.state
    pretraining = study.pretraining_set()
    yield from measure_neighbors(
        pretraining, encode(model, pixels(pretraining, state, tier.image_size))
    )
    if spec.stage == "tune":
        return
    for images in study.evaluation_sets():
        yield from measure(images, encode(model, pixels(images, state, tier.image_size)))


def _curves(run: Path) -> list[dict[str, float]]:
    if not (run / METRICS).is_file():
        return []
    lines = (json.loads(line) for line in (run / METRICS).read_text().splitlines())
    return [{name: line[name] for name in ("step", *CURVES)} for line in lines]


def _tuning_score(result: dict[str, Any]) -> float:
    return next(
        float(each["value"]) for each in result["measurements"] if each["set"] == "pretrain"
    )
