"""The configuration of a run, assembled from the sections of its rooms.

The resolved configuration is saved with the run.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from mlcd.errors import ConfigInvalid
from mlcd.locations import is_url
from mlcd.training.checkpoint.checkpoint_config import CheckpointConfig
from mlcd.training.data.augment_config import AugmentConfig
from mlcd.training.data.data_config import DataConfig, ReadingConfig
from mlcd.training.data.schedule_config import ScheduleConfig
from mlcd.training.head.loss_config import LossConfig
from mlcd.training.optim.optim_config import OptimConfig
from mlcd.training.parallel.compute_config import ComputeConfig
from mlcd.training.recipe import build_config, read_fields
from mlcd.training.section import Section
from mlcd.training.telemetry.telemetry_config import TelemetryConfig
from mlcd.training.tower_config import TowerConfig

# The version of what a run computes from the same settings. Version 1 had other crops, draws and
# initial centers.
ARITHMETIC: Final = 2

PairLossKind = Literal["clip", "siglip"]


class EvaluationConfig(Section):
    """Evaluation while training; its results go to metrics.jsonl and change nothing else."""

    every_steps: Annotated[int, Field(ge=1)] | None = None
    """The number of steps between evaluations. None: never."""
    images: str | None = None
    """Images in one sub-folder per class. None: the run's own, split by data.hold_out."""
    knn: bool = True
    """Evaluates a weighted vote of the nearest neighbors."""
    linear_probe: bool = False
    """Evaluates a logistic regression, which is slower."""


class TrainingConfig(Section):
    """The settings of every training, whatever its loss."""

    out: str
    """The directory that the run becomes."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The seed of initial weights, order of samples, augmentation, negatives and drawn labels."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """The number of CPU threads; 0 takes all cores. A resumed run is bit-identical if this is the
    same.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    log_every: Annotated[int, Field(ge=1)] = 10
    """The number of steps between lines of metrics.jsonl."""
    data: ReadingConfig
    model: TowerConfig
    loss: Section
    augment: AugmentConfig = AugmentConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig
    compute: ComputeConfig = ComputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def replays(self) -> bool:
        """Tells whether a batch that was not finite can be studied with --replay."""
        return True

    @field_validator("out")
    @classmethod
    def _is_local(cls, out: str) -> str:
        if is_url(out):
            raise ValueError("a run is a directory on this machine, and no URL")
        return out

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Self:
        if self.optim.warmup_steps > self.schedule.steps:
            raise ValueError(
                f"optim.warmup_steps={self.optim.warmup_steps} is more than "
                f"schedule.steps={self.schedule.steps}: "
                "the learning rate would never reach optim.lr"
            )
        return self


class RunConfig(TrainingConfig):
    """The settings of a training on images with labels."""

    data: DataConfig
    loss: LossConfig = LossConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _no_dead_options(self) -> Self:
        if self.model.freeze == "image":
            raise ValueError("model.freeze=image is for training on pairs; write tower")
        for name, unused in (("layer_decay", 1.0), ("ema", None)):
            if self.model.freeze == "tower" and getattr(self.optim, name) != unused:
                raise ValueError(f"optim.{name} must be left out with model.freeze=tower")
        if self.data.centers is not None and self.model.head is not None:
            raise ValueError("give model.head or data.centers, not both")
        return self

    @model_validator(mode="after")
    def _views_fit(self) -> Self:
        size, patch = self.augment.local_size, self.model.patch_size
        if size is not None and size % patch:
            raise ValueError(f"augment.local_size={size} is not a multiple of patches of {patch}")
        return self

    def identity(self) -> dict[str, Any]:
        """Returns the settings that decide the result.

        Paths are left out, because the artifact records them as parents. optim.max_skips is left
        out too, so that a run that reached it can go on with a larger one.
        """
        data: dict[str, Any] = {
            "images": True,
            "labels": True,
            "centers": True,
            "selection": True,
            "memory_gib": True,
            "workers": True,
        }
        data |= {"prefetch_steps": True, "mix": {"__all__": {"images", "labels", "selection"}}}
        excluded: dict[str, Any] = {
            "out": True,
            "data": data,
            "model": {"start": True},
            "evaluation": True,
            "telemetry": True,
        }
        excluded |= {"optim": {"max_skips": True}, "compute": {"deterministic": True}}
        return {**self.model_dump(mode="json", exclude=excluded), "arithmetic": ARITHMETIC}


def load_config(
    recipe: str, overrides: Sequence[str] = (), *, fallback: Mapping[str, Any] | None = None
) -> RunConfig:
    """Reads the recipe (a path, or the name of a built-in one) and applies `a.b=c`.

    fallback: sections and top-level keys for what neither the recipe nor an override names; its
    data section does not apply to a recipe with data.mix. With model.start the tower's sizes are
    those of the weights, whatever a built-in recipe states. Raises ConfigInvalid, which names the
    key and, for a misspelled one, makes a suggestion, and the errors of
    `mlcd.training.start.open_start`.
    """
    return validate_config(read_fields(recipe, overrides, fallback=fallback))


def states_pairs(fields: Mapping[str, Any]) -> bool:
    """Tells whether the fields are of a training on pairs of images and captions."""
    data, loss = fields.get("data"), fields.get("loss")
    if isinstance(data, Mapping) and "pairs" in data:
        return True
    return isinstance(loss, Mapping) and loss.get("kind") in get_args(PairLossKind)


def validate_config(fields: dict[str, Any]) -> RunConfig:
    """Builds the configuration of a training with labels; raises as `build_config`."""
    if states_pairs(fields):
        raise ConfigInvalid(
            "--plan, --rounds and --replay require a recipe with labels, got one of pairs",
            remedy="give `mlcd train` nothing but the recipe and its settings",
        )
    return build_config(RunConfig, fields)
