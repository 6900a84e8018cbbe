"""The configuration of a run, assembled from the sections of its sub-packages.

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

# The version of the computation: raised when the same settings give another result. Version 1
# had other crops, random draws and initial centers.
ARITHMETIC: Final = 2

PairLossKind = Literal["clip", "siglip"]


class EvaluationConfig(Section):
    """Evaluation while training; its results go to metrics.jsonl and affect nothing else."""

    every_steps: Annotated[int, Field(ge=1)] | None = None
    """The number of steps between evaluations. None: never."""
    images: str | None = None
    """Images in one sub-folder per class. None: the run's images, split by data.hold_out."""
    knn: bool = True
    """Evaluates a k-nearest-neighbor classifier with weighted votes."""
    linear_probe: bool = False
    """Evaluates a logistic regression, which is slower."""


class TrainingConfig(Section):
    """The settings of every training, whatever its loss."""

    out: str
    """The directory that the run is written to."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The seed of initial weights, order of samples, augmentation, negatives and drawn labels."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """The number of CPU threads; 0 uses all cores. A resumed run is bit-identical only if this
    number is the same.
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
    def supports_replay(self) -> bool:
        """True if --replay can run a batch with a loss or gradient that was not finite."""
        return True

    @field_validator("out")
    @classmethod
    def _is_local(cls, out: str) -> str:
        if is_url(out):
            raise ValueError(f"out must be a directory on this machine, got the URL {out}")
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
            raise ValueError(
                "model.freeze must be a number or tower for training on labels, got image"
            )
        for name, unused in (("layer_decay", 1.0), ("ema", None)):
            if self.model.freeze == "tower" and getattr(self.optim, name) != unused:
                raise ValueError(
                    f"optim.{name} has no effect with model.freeze=tower: leave it out"
                )
        if self.data.centers is not None and self.model.head is not None:
            raise ValueError("give model.head or data.centers, not both")
        return self

    @model_validator(mode="after")
    def _views_fit(self) -> Self:
        size, patch = self.augment.local_size, self.model.patch_size
        if size is not None and size % patch:
            raise ValueError(
                f"augment.local_size must be a multiple of model.patch_size={patch}, got {size}"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """Returns the settings that decide the result.

        Paths are left out, because the artifact records them as parents. optim.max_skips is left
        out so that a run that reached the limit can resume with a larger one.
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

    fallback: defaults for keys that neither the recipe nor an override sets; its data section is
    ignored for a recipe with data.mix. With model.start the tower has the sizes of the weights,
    which replace the sizes in a built-in recipe. Raises ConfigInvalid, which names the key and
    suggests one for a misspelled key, and the errors of `mlcd.training.start.open_start`.
    """
    return validate_config(read_fields(recipe, overrides, fallback=fallback))


def is_pairs_recipe(fields: Mapping[str, Any]) -> bool:
    """Tells whether a recipe's fields describe a training on pairs of images and captions."""
    data, loss = fields.get("data"), fields.get("loss")
    if isinstance(data, Mapping) and "pairs" in data:
        return True
    return isinstance(loss, Mapping) and loss.get("kind") in get_args(PairLossKind)


def validate_config(fields: dict[str, Any]) -> RunConfig:
    """Builds the configuration of a training with labels; raises ConfigInvalid."""
    if is_pairs_recipe(fields):
        raise ConfigInvalid(
            "--plan, --rounds and --replay require a recipe with labels, got a recipe with pairs",
            remedy="run `mlcd train` without these options",
        )
    return build_config(RunConfig, fields)
