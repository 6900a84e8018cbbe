"""Configuration of a run: recipes (YAML) plus `a.b=c` overrides, every key known, the result saved with the run."""

import difflib
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mlcd.errors import ConfigInvalid
from mlcd.images.transform import DecodeMode
from mlcd.keys import HELD_OUT_FRACTION
from mlcd.locations import is_url
from mlcd.losses.margins import MarginGrad, MarginKind
from mlcd.losses.negatives import NegativePolicy
from mlcd.models.vit import Activation, ViTConfig
from training.parallel.partial_fc import CenterUpdate, HeadConfig, LossKind

_SOME_CLASSES = 500
_MANY_CLASSES = 10_000  # that are all drawn
_PUBLISHED_CLASSES = 1_000_000
_PUBLISHED_SCALE = 64.0
_PUBLISHED_RATIO = 0.1
# What a run makes of the same settings; 1 cropped, drew and started from centers otherwise.
ARITHMETIC: Final = 2
_STEPS = "schedule.steps (epochs x images / schedule.batch_size)"
_OTHER_NAMES = {
    "learning_rate": "optim.lr",
    "max_lr": "optim.lr",
    "base_lr": "optim.lr",
    "epoch": _STEPS,
    "epochs": _STEPS,
    "num_epochs": _STEPS,
    "max_steps": "schedule.steps",
    "iterations": "schedule.steps",
    "batch": "schedule.batch_size",
    "bs": "schedule.batch_size",
    "wd": "optim.weight_decay",
    "warmup": "optim.warmup_steps",
    "grad_clip": "optim.clip_norm",
    "dim": "model.embedding_dim",
    "layers": "model.depth",
    "top": "loss.labels_per_image",
    "amp": "compute.precision",
    "output": "out",
}
"""Names that other programs have for the keys, by the last word."""
_VERBATIM = ("data.images", "data.labels", "data.centers", "evaluation.images", "out")


class _Section(BaseModel):
    # The docstrings below fields are what docs/reference/recipes.md says of them.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class MixedSource(_Section):
    """One of several data sets, of which each step takes a share."""

    images: str
    """As data.images."""
    labels: str
    """As data.labels; all of a mixture must be of the same centers."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the samples, relative to the other weights; it does not depend on how many images there are."""


class DataConfig(_Section):
    """What is trained on."""

    images: str | None = None
    """Folder, tar shards, parquet or zip."""
    labels: str | None = None
    """A labels artifact made from the same images."""
    mix: tuple[MixedSource, ...] = ()
    """Several data sets with weights, in place of images and labels."""
    centers: str | None = None
    """A centers artifact of model.embedding_dim that the classifier starts from. None: random centers."""
    hold_out: Annotated[float, Field(ge=0, lt=1)] = HELD_OUT_FRACTION
    """Share of each class (or overall) kept for evaluation, chosen by the hash of the key."""
    decode: DecodeMode = "exact"
    """fast: large JPEGs are decoded at a fraction of their size, which gives somewhat other pixels, sooner."""
    memory_gib: Annotated[float, Field(ge=0)] = 4.0
    """Decoded images are held in memory by each process where they fit into this; else each epoch decodes again. Each
    is counted as 3 (1.75 S)² / augment.min_area bytes, S being model.image_size; a smaller one takes less."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Processes that decode for each training process, where images are not held. None: its share of the cores."""
    prefetch_steps: Annotated[int, Field(ge=1)] = 4
    """Steps that are decoded ahead."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        single = (self.images, self.labels)
        if self.mix and single != (None, None):
            raise ValueError("give data.images and data.labels, or data.mix, not both")
        if not self.mix and None in single:
            missing = [
                name
                for name, given in zip(("images", "labels"), single, strict=True)
                if given is None
            ]
            raise PydanticCustomError("missing", "not set", {"names": missing})
        return self

    @property
    def sources(self) -> tuple[MixedSource, ...]:
        """The data sets of the run, one or several."""
        if self.mix:
            return self.mix
        assert self.images is not None
        assert self.labels is not None
        return (MixedSource(images=self.images, labels=self.labels),)


class ModelConfig(_Section):
    """The vision transformer."""

    image_size: Annotated[int, Field(ge=1)]
    """Side of the square that it sees, in pixels; a multiple of patch_size."""
    patch_size: Annotated[int, Field(ge=1)]
    """Side of a patch, in pixels."""
    width: Annotated[int, Field(ge=1)]
    """Of a token."""
    depth: Annotated[int, Field(ge=1)]
    """Blocks."""
    heads: Annotated[int, Field(ge=1)]
    """Of attention, in each block; width is a multiple of it."""
    mlp_width: Annotated[int, Field(ge=1)]
    """Of the hidden layer of each block's MLP."""
    embedding_dim: Annotated[int, Field(ge=1)]
    """Of the embedding, and so of the class centers."""
    activation: Activation = "gelu"
    """Of the MLPs."""

    def vit(self) -> ViTConfig:
        return ViTConfig(**self.model_dump())


class LossConfig(_Section):
    """What the centers and the loss are."""

    kind: LossKind = "mlcd"
    """mlcd: Eq. 5. mlc: Eq. 4. cd: Eq. 3, one label. per_column: the authors' later softmax per label."""
    labels_per_image: Annotated[int, Field(ge=1)] = 8
    """l: the nearest centers taken as positives. CD takes one."""
    drawn_from: Annotated[int, Field(ge=2)] | None = None
    """Draw the l positives out of so many nearest centers, anew each time an image is seen; those not drawn count as
    negatives then, as in the authors' later code, which draws 8 of 10. None: always the nearest l."""
    scale: Annotated[float, Field(gt=0)] | None = None
    """s. None: 16 below 500 centers, 8 up to 10,000 for mlcd and mlc (16 for the others), from there along a straight
    line of the logarithms to 64 at a million, which is the authors'."""
    negative_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """r, the share of classes drawn as negatives. None: 1 up to 10,000 centers k, then 10,000 / k, and never less than
    0.1, as published: so more centers never mean fewer negatives."""
    margin_kind: MarginKind = "arcface"
    """arcface: added to the angle. cosface: subtracted from the cosine. On positives only."""
    margin: Annotated[float, Field(ge=0, lt=1.5)] = 0.3
    """In radians (arcface), or of the cosine."""
    margin_grad: MarginGrad = "straight_through"
    """straight_through: the margin's own slope is left out, as in the authors' code. exact: it is not."""
    bias: float = 0.0
    """b of Eq. 5 read as ZLPR with threshold -b; only for mlcd, the others do not depend on it."""
    policy: NegativePolicy = "independent"
    """How negatives are drawn; per_column always draws as partialfc, each label for itself."""
    correct_ratio: bool = False
    """Add log(1/r) to the negatives' log-sum, as if all had been used."""
    filter_threshold: Annotated[float, Field(gt=-1, le=1)] | None = None
    """Negatives more similar than this are left out; the authors' later code uses 0.75."""
    center_update: CenterUpdate = "sparse"
    """sparse: only centers that a step touched move. dense: AdamW moves all, by momentum."""

    @model_validator(mode="after")
    def _no_dead_options(self) -> Self:
        if self.bias != 0.0 and self.kind != "mlcd":
            raise ValueError(f"loss.bias has no effect on {self.kind}")
        if self.correct_ratio and self.filter_threshold is not None:
            raise ValueError(
                "loss.correct_ratio would add back what loss.filter_threshold leaves out: take one of them"
            )
        if self.kind == "per_column" and (self.policy != "independent" or self.correct_ratio):
            raise ValueError("loss.policy and loss.correct_ratio have no effect on per_column")
        if self.margin_kind == "none" and "margin" in self.model_fields_set:
            raise ValueError("loss.margin has no effect with loss.margin_kind=none")
        if self.drawn_from is not None and self.drawn_from <= self.num_labels:
            raise ValueError(
                f"loss.drawn_from must be more than the {self.num_labels} labels per image"
            )
        return self

    @property
    def num_labels(self) -> int:
        """Labels that each image is trained with at most."""
        return 1 if self.kind == "cd" else self.labels_per_image

    @property
    def num_stored(self) -> int:
        """Labels that each image must come with."""
        return self.drawn_from or self.num_labels

    def head(self, num_classes: int, seed: int) -> HeadConfig:
        """With the defaults that follow the number of classes filled in."""
        fields = self.model_dump(
            exclude={"labels_per_image", "drawn_from", "scale", "negative_ratio"}
        )
        return HeadConfig(
            **fields,
            scale=self.resolved_scale(num_classes),
            negative_ratio=self.resolved_ratio(num_classes),
            seed=seed,
        )

    def resolved_scale(self, num_classes: int) -> float:
        """Returns what was measured for few classes, the authors' for a million, and no jump between the two.

        For the evidence see docs/explanation/validation.md.
        """
        if self.scale is not None:
            return self.scale
        few = 8.0 if num_classes >= _SOME_CLASSES and self.kind in ("mlcd", "mlc") else 16.0
        way = math.log(num_classes / _MANY_CLASSES) / math.log(_PUBLISHED_CLASSES / _MANY_CLASSES)
        return float(few * (_PUBLISHED_SCALE / few) ** min(1.0, max(0.0, way)))

    def resolved_ratio(self, num_classes: int) -> float:
        return self.negative_ratio or max(_PUBLISHED_RATIO, min(1.0, _MANY_CLASSES / num_classes))


class AugmentConfig(_Section):
    """Random resized crop, distributed as torchvision's, and flip; the defaults are the authors' later recipe's."""

    min_area: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Least share of the picture's area that a crop has, where one of the drawn aspect fits."""
    max_aspect: Annotated[float, Field(ge=1)] = 1.25
    """Largest ratio of a crop's sides, of the picture as it is."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the images that are mirrored."""


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(_Section):
    """AdamW, of the tower and of the centers."""

    lr: Annotated[float, Field(gt=0)] = 1e-3
    """The learning rate's peak, after the warm-up; then it follows a cosine to 0."""
    center_lr: Annotated[float, Field(gt=0)] | None = None
    """Of the centers. None: the same as lr."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """Of the tower's matrices; biases, norms, the class token, positions and the centers do not decay."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.98)
    """Decay of the mean gradient, and of the mean squared one."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the mean squared gradient that the update is divided by."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """In which the learning rate rises; at most schedule.steps."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 5.0
    """Largest norm of the gradient of tower and centers together. None: not clipped."""
    max_skips: Annotated[int, Field(ge=0)] = 0
    """Steps whose loss or gradient is not finite that may be left out before the run stops; each batch is saved."""


class ScheduleConfig(_Section):
    """How long."""

    steps: Annotated[int, Field(ge=1)]
    """Updates of the weights."""
    batch_size: Annotated[int, Field(ge=1)] = 128
    """Images of a step, of all processes together."""


class ComputeConfig(_Section):
    """How a step is computed. None of it changes what is computed, beyond rounding."""

    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """bf16: the backbone under autocast, weights and the loss in float32. fp64 is for tests of exactness."""
    accumulation: Annotated[int, Field(ge=1)] = 1
    """Parts that each step's batch is computed in, one after the other, to save memory."""
    recompute: bool = False
    """Keep no activations inside blocks; compute them again in the backward pass (gradient checkpointing)."""
    compile: bool = False
    """torch.compile of every block."""
    backbone: Literal["ddp", "fsdp"] = "ddp"
    """fsdp: the backbone's weights and moments are sharded over processes too, for towers too large for one."""


class CheckpointConfig(_Section):
    """What is saved while training."""

    every_steps: Annotated[int, Field(ge=1)] = 100
    """How often."""
    keep_last: Annotated[int, Field(ge=1)] = 1
    """Beside step 0, the untrained model, and the final step, which always stay."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Also keep those of every so many steps."""
    asynchronous: bool = True
    """Write while training goes on."""


class EvaluationConfig(_Section):
    """Evaluation while training; its results go to metrics.jsonl and change nothing else."""

    every_steps: Annotated[int, Field(ge=1)] | None = None
    """None: never."""
    images: str | None = None
    """Images in one sub-folder per class. None: those that the run is trained on, split by data.hold_out."""
    knn: bool = True
    """Weighted vote of the nearest neighbors."""
    linear_probe: bool = False
    """Logistic regression; slower."""


class TelemetryConfig(_Section):
    """What is told beside metrics.jsonl."""

    tensorboard: bool = False
    """Also write events for TensorBoard (needs the tensorboard package)."""
    keys: bool = False
    """Also log the keys of each step's samples, keys-RANK.jsonl."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Of one process's device at this precision, for MFU. None: measured at the start."""


class RunConfig(_Section):
    out: str
    """The directory that the run becomes."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of first weights, order of samples, augmentation, negatives and drawn labels."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads; 0 takes all cores. A resumed run is bit-identical when this is the same."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""
    log_every: Annotated[int, Field(ge=1)] = 10
    """Steps between lines of metrics.jsonl."""
    data: DataConfig
    model: ModelConfig
    loss: LossConfig = LossConfig()
    augment: AugmentConfig = AugmentConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig
    compute: ComputeConfig = ComputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

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
                f"optim.warmup_steps={self.optim.warmup_steps} is more than schedule.steps={self.schedule.steps}: "
                "the learning rate would never reach optim.lr"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """What decides the result: everything but places, which the artifact records as parents.

        Without optim.max_skips: a run that met it goes on with more.
        """
        data: dict[str, Any] = {
            "images": True,
            "labels": True,
            "centers": True,
            "memory_gib": True,
            "workers": True,
        }
        data |= {"prefetch_steps": True, "mix": {"__all__": {"images", "labels"}}}
        excluded: dict[str, Any] = {
            "out": True,
            "data": data,
            "evaluation": True,
            "telemetry": True,
        }
        excluded |= {"optim": {"max_skips": True}}
        return {**self.model_dump(mode="json", exclude=excluded), "arithmetic": ARITHMETIC}


def load_config(
    recipe: str, overrides: Sequence[str] = (), *, fallback: Mapping[str, Any] | None = None
) -> RunConfig:
    """The recipe (a path, or the name of a built-in one) with `a.b=c` applied.

    fallback: of sections, and of keys of the top level, what stands in where neither names it; for no data.mix.
    Raises ConfigInvalid naming the key, with a suggestion for a misspelled one.
    """
    return _with_overrides(_read_recipe(recipe), overrides, fallback or {})


def change_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The same with `a.b=c` applied; ConfigInvalid as in `load_config`."""
    return _with_overrides(config.model_dump(mode="json"), overrides, {})


def _with_overrides(
    fields: dict[str, Any], overrides: Sequence[str], fallback: Mapping[str, Any]
) -> RunConfig:
    for override in overrides:
        name, separator, value = override.partition("=")
        if not separator or not name:
            raise ConfigInvalid(
                f"{override!r} is not an override", remedy="write it as section.key=value"
            )
        _assign(fields, name.split("."), _parsed(name, value), override)
    return validate_config(_filled(fields, fallback))


def _filled(fields: dict[str, Any], fallback: Mapping[str, Any]) -> dict[str, Any]:
    filled = {**fallback, **fields}
    for name, section in fallback.items():
        given = fields.get(name)
        if isinstance(section, Mapping) and isinstance(given, dict) and not given.get("mix"):
            filled[name] = {**section, **given}
    return filled


def _parsed(name: str, value: str) -> object:
    if name in _VERBATIM:  # a folder may be called 2024, or "photos #1"
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigInvalid(f"{name}={value} cannot be read", remedy="quote it as YAML") from error


def validate_config(fields: dict[str, Any]) -> RunConfig:
    """The fields as a configuration. Raises ConfigInvalid naming an unknown key, else all that is missing."""
    required = (
        name
        for name, field in RunConfig.model_fields.items()
        if field.is_required() and name != "out"
    )
    sections: dict[str, Any] = {name: {} for name in required}
    try:
        return RunConfig.model_validate({**sections, **fields})
    except ValidationError as error:
        errors = error.errors()
        for found in errors:  # first: a misspelled key is why another one is missing
            if found["type"] == "extra_forbidden":
                name = _dotted(found["loc"])
                raise ConfigInvalid(f"unknown key {name}", remedy=_suggestion(name)) from error
        if missing := [
            name for found in errors if found["type"] == "missing" for name in _missing(found)
        ]:
            are = "is" if len(missing) == 1 else "are"
            remedy = f"add {' '.join(f'{name}=VALUE' for name in missing)}"
            raise ConfigInvalid(f"{', '.join(missing)} {are} not set", remedy=remedy) from error
        first = errors[0]
        if not first["loc"]:  # what several sections say does not go together
            raise ConfigInvalid(first["msg"].removeprefix("Value error, ")) from error
        raise ConfigInvalid(
            f"{_dotted(first['loc'])}={first['input']!r}: {first['msg'].lower().removeprefix('value error, ')}"
        ) from error


def _dotted(place: Sequence[int | str]) -> str:
    return ".".join(map(str, place))


def _missing(found: Mapping[str, Any]) -> list[str]:
    """The keys that an error of type missing is about: a section may tell which of its own."""
    names = found.get("ctx", {}).get("names")
    return (
        [_dotted(found["loc"])]
        if names is None
        else [_dotted((*found["loc"], name)) for name in names]
    )


def _suggestion(name: str) -> str:
    """The remedy for an unknown key: one that is called so elsewhere, or by others, or nearly so."""
    known = _known_keys(RunConfig)
    section, _, word = name.rpartition(".")
    if (other := _OTHER_NAMES.get(word.lower())) is not None:
        return f"did you mean {other}?"
    by_word: dict[str, str] = {}
    for key in sorted(
        known, key=lambda key: not key.startswith(f"{section}.")
    ):  # its own section's first
        by_word.setdefault(key.rpartition(".")[2], key)
    if close := difflib.get_close_matches(word, by_word, n=1):
        return f"did you mean {by_word[close[0]]}?"
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return f"did you mean {close[0]}?"
    own = [key for key in known if section and key.startswith(f"{section}.")]
    return f"known: {', '.join(own or known)}"


def built_in_recipes() -> list[str]:
    folder = resources.files("training") / "recipes"
    return sorted(
        item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")
    )


def _read_recipe(recipe: str) -> dict[str, Any]:
    try:
        if recipe in built_in_recipes():
            text = (resources.files("training") / "recipes" / f"{recipe}.yaml").read_text()
        else:
            text = Path(recipe).read_text()
        fields = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(built_in_recipes())
        raise ConfigInvalid(
            f"there is no recipe {recipe}", remedy=f"give a YAML file or one of {names}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigInvalid(f"{recipe} is not YAML") from error
    if not isinstance(fields, dict):
        raise ConfigInvalid(f"{recipe} holds no sections")
    return fields


def _assign(fields: dict[str, Any], path: list[str], value: object, override: str) -> None:
    for name in path[:-1]:
        fields = fields.setdefault(name, {})
        if not isinstance(fields, dict):
            raise ConfigInvalid(f"{override!r}: {name} is a value, not a section")
    fields[path[-1]] = value


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    names = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += _known_keys(field.annotation, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names
