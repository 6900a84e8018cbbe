"""The configuration of a run: a recipe (YAML) plus `a.b=c` overrides.

Unknown keys are refused. The resolved configuration is saved with the run.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mlcd.errors import ConfigInvalid
from mlcd.images.transform import DecodeMode
from mlcd.keys import HELD_OUT_FRACTION
from mlcd.locations import is_url
from mlcd.losses.margins import MarginGrad, MarginKind
from mlcd.losses.negatives import NegativePolicy
from mlcd.models.blocks import Activation
from mlcd.models.vit import Positions, ViTConfig
from training.start import SIZES, tower_fields

_SOME_CLASSES = 500
_MANY_CLASSES = 10_000  # the most classes that are all drawn as negatives
_PUBLISHED_CLASSES = 1_000_000
_PUBLISHED_SCALE = 64.0
_PUBLISHED_RATIO = 0.1
_MARGIN: Final = 0.3
# The version of what a run computes from the same settings. Version 1 had other crops, draws and
# initial centers.
ARITHMETIC: Final = 2
_STEPS = "schedule.steps (epochs x images / schedule.batch_size)"
# The names that other programs have for the keys, by the last word.
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
_TEXT_SIZES: Final = ("context_length", "width", "depth", "heads", "mlp_width", "activation")
_VERBATIM = (
    "data.images",
    "data.labels",
    "data.centers",
    "data.selection",
    "data.pairs",
    "data.embeddings",
    "model.start",
    "model.like",
    "text.start",
    "text.tokenizer",
    "evaluation.images",
    "out",
)


LossKind = Literal["mlcd", "mlc", "cd"]
PairLossKind = Literal["clip", "siglip"]
CenterUpdate = Literal["sparse", "dense"]
Precision = Literal["fp32", "bf16", "fp64"]
Gathered = Literal["fp32", "bf16"]
Products = Literal["fp32", "tf32", "bf16"]
_Config = TypeVar("_Config", bound="TrainingConfig")


class Section(BaseModel):
    """A part of a recipe, in which unknown keys are refused."""

    # The docstrings below fields become their descriptions in docs/reference/recipes.md.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class MixedSource(Section):
    """One of several data sets; each step takes a share of its samples from it."""

    images: str
    """The images, as in data.images."""
    labels: str
    """The labels, as in data.labels. All data sets of a mixture must share the same centers."""
    selection: str | None = None
    """The selection, as in data.selection."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """The share of the samples, relative to the other weights."""


class ReadingConfig(Section):
    """The way images are read."""

    decode: DecodeMode = "exact"
    """fast: decodes large JPEGs at a fraction of their size, with slightly different pixels."""
    memory_gib: Annotated[float, Field(ge=0)] = 4.0
    """The memory in GiB of each process for decoded images; others are decoded again in each epoch.
    An image counts as at most 3 (1.75 S)² / augment.min_area bytes, where S is model.image_size.
    """
    workers: Annotated[int, Field(ge=0)] | None = None
    """Decoding processes for each training process, where images are not held in memory. None: its
    share of the cores.
    """
    prefetch_steps: Annotated[int, Field(ge=1)] = 4
    """Steps that are decoded ahead."""


class DataConfig(ReadingConfig):
    """The data that the run trains on."""

    images: str | None = None
    """A folder, tar shards, parquet files or a zip."""
    labels: str | None = None
    """A labels artifact made from the same images."""
    selection: str | None = None
    """A selection of the same images by `mlcd curate`: the run is trained on those that it keeps.
    None: on all.
    """
    mix: tuple[MixedSource, ...] = ()
    """Several data sets with weights, instead of images and labels."""
    centers: str | None = None
    """Centers of the embedding's dimension that the classifier starts from. None: random ones, or
    those of model.start.
    """
    hold_out: Annotated[float, Field(ge=0, lt=1)] = HELD_OUT_FRACTION
    """The share of each class (or of all images) kept for evaluation, chosen by the hash of the
    key.
    """

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        single = (self.images, self.labels)
        if self.mix and (*single, self.selection) != (None, None, None):
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
        return (MixedSource(images=self.images, labels=self.labels, selection=self.selection),)


class TowerConfig(Section):
    """The vision transformer.

    With model.start all sizes come from there, and only image_size may be another one.
    """

    start: str | None = None
    """Weights to start from: a run or checkpoint, a model artifact, a directory of Hugging Face or
    open_clip, a file of weights, or hub:ORGANIZATION/MODEL. None: random weights.
    """
    like: str | None = None
    """The published tower whose sizes, activation and preprocessing a bare file of weights has."""
    head: Literal["kept", "new"] | None = None
    """kept: the centers of model.start. new: random ones. None: kept if the labels name the classes
    that the start was trained on.
    """
    freeze: Annotated[int, Field(ge=0)] | Literal["tower", "image"] = 0
    """The number of first blocks that are not trained. tower: only the classifier is trained.
    image: only the text tower is trained, on pairs.
    """
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of samples that the last block's attention and MLP each leave out while training;
    it rises linearly from 0 at the first block.
    """
    image_size: Annotated[int, Field(ge=1)]
    """The side of the image in pixels; a multiple of patch_size."""
    patch_size: Annotated[int, Field(ge=1)]
    """The side of a patch, in pixels."""
    width: Annotated[int, Field(ge=1)]
    """The dimension of a token."""
    depth: Annotated[int, Field(ge=1)]
    """The number of blocks."""
    heads: Annotated[int, Field(ge=1)]
    """Attention heads in each block; they divide width."""
    mlp_width: Annotated[int, Field(ge=1)]
    """The hidden dimension of each block's MLP."""
    embedding_dim: Annotated[int, Field(ge=1)] | None
    """The dimension of the embedding and of the centers. null: width, without a projection, as in
    MLCD's towers.
    """
    activation: Activation = "gelu"
    """The activation of the MLPs."""
    positions: Positions = "learned"
    """learned: a table of positions, as CLIP's. rope: rotary positions, as in MLCD's largest
    towers.
    """
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """The term added to the variance in every norm."""
    registers: Annotated[int, Field(ge=0)] = 0
    """The number of register tokens beside the class token."""

    @model_validator(mode="after")
    def _no_dead_options(self) -> Self:
        if self.start is None:
            for name in ("like", "head"):
                if getattr(self, name) is not None:
                    raise ValueError(f"model.{name} has no effect without model.start")
        if isinstance(self.freeze, str):
            if self.drop_path:
                raise ValueError(f"model.drop_path has no effect with model.freeze={self.freeze}")
        elif self.freeze > self.depth:
            raise ValueError(
                f"model.freeze={self.freeze} is more than the {self.depth} blocks of the tower"
            )
        return self

    @property
    def output_dim(self) -> int:
        """Returns the dimension of the embedding."""
        return self.embedding_dim or self.width

    @property
    def num_frozen(self) -> int:
        """Returns the number of blocks that are not trained."""
        return self.depth if isinstance(self.freeze, str) else self.freeze

    def vit(self) -> ViTConfig:
        return ViTConfig(
            **self.model_dump(exclude={"start", "like", "head", "freeze", "drop_path"})
        )


class AnyLossConfig(Section):
    """A loss."""


class LossConfig(AnyLossConfig):
    """The loss and its class centers."""

    kind: LossKind = "mlcd"
    """mlcd: Eq. 5. mlc: Eq. 4. cd: Eq. 3, one label."""
    labels_per_image: Annotated[int, Field(ge=1)] = 8
    """l, the number of nearest centers taken as positives. CD takes one."""
    drawn_from: Annotated[int, Field(ge=2)] | None = None
    """The number of nearest centers that the l positives are drawn from each time an image is seen;
    the others count as negatives. The authors' later code draws 8 of 10. None: always the nearest
    l.
    """
    scale: Annotated[float, Field(gt=0)] | None = None
    """s, the scale of the logits. None: 16 below 500 centers; up to 10,000 centers 8 for mlcd and
    mlc, 16 for cd; from there linear in the logarithms to the authors' 64 at a million.
    """
    learn_scale: bool = False
    """The scale is learned, and loss.scale is where it starts."""
    negative_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """r, the share of classes drawn as negatives. None: 1 up to 10,000 centers k, then 10,000 / k,
    at least the published 0.1.
    """
    margin_kind: MarginKind = "arcface"
    """arcface: added to the angle. cosface: subtracted from the cosine. Applies to positives only.
    """
    margin: Annotated[float, Field(ge=0, lt=1.5)] = _MARGIN
    """The margin in radians (arcface), or in units of the cosine (cosface)."""
    margin_grad: MarginGrad = "straight_through"
    """straight_through: without the margin's own slope, as in the authors' code. exact: with it."""
    bias: float | None = None
    """b, added to every logit; mlcd is then ZLPR with threshold -b. Only for mlcd. None: 0, and
    -log(r k / l) where it is learned, which weighs negatives and positives alike.
    """
    learn_bias: bool = False
    """The bias is learned, and loss.bias is where it starts."""
    label_weights: Literal["scores"] | None = None
    """scores: labels count by their stored similarity, relative to the mean of the image's. None:
    alike.
    """
    policy: NegativePolicy = "independent"
    """How negatives are drawn."""
    correct_ratio: bool = False
    """Adds log(1/r) to the negatives' log-sum, as if all negatives had been used."""
    filter_threshold: Annotated[float, Field(gt=-1, le=1)] | None = None
    """Negatives more similar than this are left out. The authors' later code uses 0.75."""
    center_update: CenterUpdate = "sparse"
    """sparse: only centers that a step touched move. dense: AdamW moves all centers, by momentum.
    """

    @model_validator(mode="after")
    def _no_dead_options(self) -> Self:
        if self.kind != "mlcd":
            if self.bias:
                raise ValueError(f"loss.bias has no effect on {self.kind}")
            if self.learn_bias:
                raise ValueError(f"loss.learn_bias has no effect on {self.kind}")
        if self.label_weights is not None and self.num_labels == 1:
            raise ValueError("loss.label_weights has no effect on a single label")
        if self.correct_ratio and self.filter_threshold is not None:
            raise ValueError(
                "loss.correct_ratio would add back what loss.filter_threshold leaves out: take one "
                "of them"
            )
        # Not what is set: a saved configuration sets everything.
        if self.margin_kind == "none" and self.margin != _MARGIN:
            raise ValueError("loss.margin has no effect with loss.margin_kind=none")
        if self.drawn_from is not None and self.drawn_from <= self.num_labels:
            raise ValueError(
                f"loss.drawn_from must be more than the {self.num_labels} labels per image"
            )
        return self

    @property
    def num_labels(self) -> int:
        """Returns the most labels that an image is trained with."""
        return 1 if self.kind == "cd" else self.labels_per_image

    @property
    def num_stored(self) -> int:
        """Returns the number of labels that each image must come with."""
        return self.drawn_from or self.num_labels

    def resolved_scale(self, num_classes: int) -> float:
        """Returns the scale measured for few classes, the authors' for a million, without a jump.

        For the evidence see docs/explanation/validation.md.
        """
        if self.scale is not None:
            return self.scale
        few = 8.0 if num_classes >= _SOME_CLASSES and self.kind in ("mlcd", "mlc") else 16.0
        way = math.log(num_classes / _MANY_CLASSES) / math.log(_PUBLISHED_CLASSES / _MANY_CLASSES)
        return float(few * (_PUBLISHED_SCALE / few) ** min(1.0, max(0.0, way)))

    def resolved_bias(self, num_classes: int) -> float:
        if self.bias is not None:
            return self.bias
        if not self.learn_bias:
            return 0.0
        return -math.log(self.resolved_ratio(num_classes) * num_classes / self.num_labels)

    def resolved_ratio(self, num_classes: int) -> float:
        return self.negative_ratio or max(_PUBLISHED_RATIO, min(1.0, _MANY_CLASSES / num_classes))


_Share = Annotated[float, Field(ge=0, le=1)]
# One for all views, or one for each of augment.views and then one for all of augment.local_views.
_Shares = _Share | tuple[_Share, ...]
_JITTERED: Final = 0.8


class AugmentConfig(Section):
    """Random resized crop, flip and changes of color, distributed like torchvision's.

    The defaults are those of the authors' later recipe, which changes no colors and takes one view.
    """

    views: Annotated[int, Field(ge=1)] = 1
    """Views of model.image_size of each image. Each has the image's labels, and the loss is the
    mean over views.
    """
    min_area: Annotated[float, Field(gt=0, le=1)] = 0.7
    """The smallest share of the image's area that a crop has, if a crop of the drawn aspect fits.
    """
    max_aspect: Annotated[float, Field(ge=1)] = 1.25
    """The largest ratio of a crop's sides, measured on the original image."""
    flip: _Share = 0.5
    """The share of the images that are mirrored."""
    local_views: Annotated[int, Field(ge=0)] = 0
    """Further views of augment.local_size of each image (multi-crop)."""
    local_size: Annotated[int, Field(ge=1)] | None = None
    """The side of a local view in pixels, a multiple of model.patch_size."""
    local_area: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (
        0.05,
        0.32,
    )
    """The smallest and the largest share of the image's area that a local view has."""
    brightness: Annotated[float, Field(ge=0)] = 0.0
    """Pixels are multiplied by a factor within 1 ± this."""
    contrast: Annotated[float, Field(ge=0)] = 0.0
    """Differences from the mean gray are multiplied by a factor within 1 ± this."""
    saturation: Annotated[float, Field(ge=0)] = 0.0
    """Differences from a pixel's own gray are multiplied by a factor within 1 ± this."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """The hue turns by at most this share of the circle."""
    jitter: _Share = _JITTERED
    """The share of the views that brightness, contrast, saturation and hue apply to."""
    grayscale: _Share = 0.0
    """The share of the views that lose their colors."""
    blur: _Shares = 0.0
    """The share of the views that are blurred: a number, or a list with one for each of
    augment.views, then one for the local views.
    """
    blur_sigma: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (0.1, 2.0)
    """The smallest and the largest standard deviation of the blur, in pixels of the view."""
    solarize: _Shares = 0.0
    """The share of the views whose values from 128 are inverted; a number or a list, as blur."""

    @model_validator(mode="after")
    def _no_dead_options(self) -> Self:
        if (self.local_size is None) != (self.local_views == 0):
            raise ValueError("augment.local_views and augment.local_size have no effect alone")
        if self.jitter != _JITTERED and not any(self.jitters.values()):
            raise ValueError(
                "augment.jitter has no effect without brightness, contrast, saturation or hue"
            )
        for name in ("local_area", "blur_sigma"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"augment.{name} ends before it begins")
        for name in ("blur", "solarize"):
            shares, wanted = getattr(self, name), self.views + bool(self.local_views)
            if isinstance(shares, tuple) and len(shares) != wanted:
                raise ValueError(
                    f"augment.{name} has {len(shares)} numbers, and there are {wanted} kinds of "
                    "views"
                )
        return self

    @property
    def num_views(self) -> int:
        """Returns the number of views of an image, global and local."""
        return self.views + self.local_views

    @property
    def jitters(self) -> dict[str, float]:
        """Returns the strength of each change that `jitter` is about."""
        names = ("brightness", "contrast", "saturation", "hue")
        return {name: getattr(self, name) for name in names}

    def share_of(self, name: Literal["blur", "solarize"], view: int) -> float:
        """Returns the share of a view that is changed so; views are counted from 0, local ones
        last.
        """
        shares: float | tuple[float, ...] = getattr(self, name)
        return shares[min(view, self.views)] if isinstance(shares, tuple) else shares

    def size_of(self, view: int, image_size: int) -> int:
        """Returns the side of a view; global ones have the model's."""
        if view < self.views:
            return image_size
        assert self.local_size is not None
        return self.local_size

    def area_of(self, view: int) -> tuple[float, float]:
        """Returns the smallest and the largest share of the image's area that a view has."""
        return (self.min_area, 1.0) if view < self.views else self.local_area


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """The settings of AdamW for the tower and the centers."""

    lr: Annotated[float, Field(gt=0)] = 1e-3
    """The peak of the learning rate; from there it follows a cosine to 0."""
    center_lr: Annotated[float, Field(gt=0)] | None = None
    """The learning rate of the centers. None: the same as lr."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """The weight decay of the tower's matrices; nothing else decays."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.98)
    """The decay of the mean gradient, and of the mean squared gradient."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """The term added to the root of the mean squared gradient."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """The number of steps in which the learning rate rises; at most schedule.steps."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 5.0
    """The largest norm of the gradient of tower and centers together. None: not clipped."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The learning rate of each block relative to that of the block after it; the projection and
    the last norm have lr itself.
    """
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The decay of a moving average of the tower's weights, which is then evaluated and exported;
    at most (1 + n) / (10 + n) after n steps. None: no average.
    """
    max_skips: Annotated[int, Field(ge=0)] = 0
    """Steps without a finite loss and gradient that are skipped before the run stops. Each such
    batch is saved.
    """


class ScheduleConfig(Section):
    """The length of the run."""

    steps: Annotated[int, Field(ge=1)]
    """The number of updates of the weights."""
    batch_size: Annotated[int, Field(ge=1)] = 128
    """The number of images in a step, over all processes."""


class ComputeConfig(Section):
    """The way a step is computed; it changes results by no more than rounding."""

    precision: Precision = "fp32"
    """bf16: the backbone runs under autocast. fp64 is for tests of exactness."""
    head_products: Products = "fp32"
    """The matrix products of the head's negatives. tf32 (on a GPU) and bf16 shorten their inputs
    to 11 and 8 significant bits and sum in float32; docs/explanation/head.md states the error.
    """
    accumulation: Annotated[int, Field(ge=1)] = 1
    """Micro-batches that each step's batch is split into, to save memory."""
    recompute: bool = False
    """Computes activations inside blocks again in the backward pass (gradient checkpointing)."""
    compile: bool = False
    """Compiles every block with torch.compile."""
    deterministic: bool | None = None
    """Uses only algorithms that give the same bits each time. None: on the CPU. On a GPU some are
    slow, and a step that has none is refused.
    """
    backbone: Literal["ddp", "fsdp"] = "ddp"
    """fsdp: shards the backbone's weights and moments over processes."""
    gathered: Gathered = "fp32"
    """The type in which fsdp gathers the blocks' weights; bf16 halves that traffic. Sums and
    updates stay in float32.
    """

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if self.gathered == "bf16" and (self.backbone, self.precision) != ("fsdp", "bf16"):
            raise ValueError(
                "compute.gathered=bf16 is for compute.backbone=fsdp with compute.precision=bf16"
            )
        if self.precision == "fp64" and self.head_products != "fp32":
            raise ValueError(
                f"compute.head_products={self.head_products} is not exact, and "
                "compute.precision=fp64 is for tests of exactness"
            )
        return self


class CheckpointConfig(Section):
    """The checkpoints that are saved while training."""

    every_steps: Annotated[int, Field(ge=1)] = 100
    """The number of steps between checkpoints."""
    keep_last: Annotated[int, Field(ge=1)] = 1
    """Latest checkpoints that stay, besides step 0 and the final step."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """The checkpoints whose step is a multiple of this number also stay."""
    asynchronous: bool = True
    """Writes checkpoints while training goes on."""


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


class TelemetryConfig(Section):
    """The records that a run writes besides metrics.jsonl."""

    tensorboard: bool = False
    """Also writes events for TensorBoard (needs the tensorboard package)."""
    keys: bool = False
    """Also logs the keys of each step's samples, in keys-RANK.jsonl."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """The matrix limit of one device in TFLOP/s, for MFU. None: measured at the start."""


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
    loss: AnyLossConfig
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
                raise ValueError(f"optim.{name} has no effect with model.freeze=tower")
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
    `training.start.open_start`.
    """
    return validate_config(read_fields(recipe, overrides, fallback=fallback))


def read_fields(
    recipe: str, overrides: Sequence[str] = (), *, fallback: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the fields of a recipe as `load_config` builds a configuration of them."""
    stated = _read_recipe(recipe)
    if recipe in built_in_recipes():
        stated = _without_replaced_towers(stated, overrides)
    fields = overridden(stated, overrides, fallback or {})
    tower = fields.get("model")
    if isinstance(tower, dict) and (start := tower.get("start")) is not None:
        sizes = tower_fields(str(start), tower.get("like"), tower)
        fields["model"] = {**tower, **sizes}
    return fields


def _without_replaced_towers(fields: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the fields without the sizes of towers that the overrides start from weights.

    A recipe that states a resolution alone, and no tower, keeps it.
    """
    started = overridden({}, overrides, {})
    kept = dict(fields)
    for section, sizes in (("model", SIZES), ("text", _TEXT_SIZES)):
        given, stated = started.get(section), fields.get(section)
        if not isinstance(given, Mapping) or not isinstance(stated, Mapping):
            continue
        if given.get("start") not in (None, stated.get("start")) and "width" in stated:
            kept[section] = {name: stated[name] for name in stated if name not in sizes}
    return kept


def overridden(
    fields: dict[str, Any], overrides: Sequence[str], fallback: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the fields with `a.b=c` applied; fallback is that of `load_config`."""
    for override in overrides:
        name, separator, value = override.partition("=")
        if not separator or not name:
            raise ConfigInvalid(
                f"{override!r} is not an override", remedy="write it as section.key=value"
            )
        _assign(fields, name.split("."), _parsed(name, value), override)
    return _filled(fields, fallback)


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


def states_pairs(fields: Mapping[str, Any]) -> bool:
    """Tells whether the fields are of a training on pairs of images and captions."""
    data, loss = fields.get("data"), fields.get("loss")
    if isinstance(data, Mapping) and "pairs" in data:
        return True
    return isinstance(loss, Mapping) and loss.get("kind") in get_args(PairLossKind)


def validate_config(fields: dict[str, Any]) -> RunConfig:
    """Builds the configuration of a training with labels; raises as `validated`."""
    if states_pairs(fields):
        raise ConfigInvalid(
            "a recipe of pairs of images and captions has no plan, rounds or replay",
            remedy="give `mlcd train` nothing but the recipe and its settings",
        )
    return validated(RunConfig, fields)


def validated(kind: type[_Config], fields: dict[str, Any]) -> _Config:
    """Builds a configuration from its fields.

    Raises ConfigInvalid, which names an unknown key, or else everything that is missing.
    """
    required = (
        name for name, field in kind.model_fields.items() if field.is_required() and name != "out"
    )
    sections: dict[str, Any] = {name: {} for name in required}
    try:
        return kind.model_validate({**sections, **fields})
    except ValidationError as error:
        errors = error.errors()
        # A misspelled key comes first, because it may be why another one is missing.
        for found in errors:
            if found["type"] == "extra_forbidden":
                name = _dotted(found["loc"])
                raise ConfigInvalid(
                    f"unknown key {name}", remedy=_suggestion(name, kind)
                ) from error
        if missing := [
            name for found in errors if found["type"] == "missing" for name in _missing(found)
        ]:
            are = "is" if len(missing) == 1 else "are"
            remedy = f"add {' '.join(f'{name}=VALUE' for name in missing)}"
            raise ConfigInvalid(f"{', '.join(missing)} {are} not set", remedy=remedy) from error
        first = errors[0]
        if not first["loc"]:  # The error is about how several sections fit together.
            raise ConfigInvalid(first["msg"].removeprefix("Value error, ")) from error
        raise ConfigInvalid(
            f"{_dotted(first['loc'])}={first['input']!r}: "
            f"{first['msg'].lower().removeprefix('value error, ')}"
        ) from error


def _dotted(path: Sequence[int | str]) -> str:
    return ".".join(map(str, path))


def _missing(found: Mapping[str, Any]) -> list[str]:
    """Returns the keys that an error of type missing is about; a section may name several of its
    own.
    """
    names = found.get("ctx", {}).get("names")
    return (
        [_dotted(found["loc"])]
        if names is None
        else [_dotted((*found["loc"], name)) for name in names]
    )


def _suggestion(name: str, kind: type[TrainingConfig]) -> str:
    """Returns the remedy for an unknown key: the likeliest known one.

    That is a key of the same last word elsewhere, one for a name from other programs, or a similar
    spelling.
    """
    known = _known_keys(kind)
    section, _, word = name.rpartition(".")
    if (other := _OTHER_NAMES.get(word.lower())) is not None:
        return f"did you mean {other}?"
    by_word: dict[str, str] = {}
    # The keys of its own section go first.
    for key in sorted(known, key=lambda key: not key.startswith(f"{section}.")):
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
