"""The configuration of a training on pairs of images and captions."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Final, Self

from pydantic import Field, model_validator

from mlcd.models.blocks import Activation
from mlcd.models.text import TextConfig
from mlcd.training.config import (
    ARITHMETIC,
    PairLossKind,
    RunConfig,
    TrainingConfig,
    is_pairs_recipe,
    validate_config,
)
from mlcd.training.data.augment_config import AugmentConfig
from mlcd.training.data.data_config import ReadingConfig
from mlcd.training.recipe import apply_overrides, build_config, read_fields
from mlcd.training.section import Section

_SCALES: Final = {"clip": 1 / 0.07, "siglip": 10.0}
MAX_LOG_SCALE: Final = math.log(100.0)  # as in CLIP


class PairsDataConfig(ReadingConfig):
    """The pairs of images and captions that the run trains on."""

    pairs: str
    """Images with captions: a folder, tar shards, parquet files or a zip. If an image has several
    captions, each step draws one.
    """
    embeddings: str | None = None
    """With model.freeze=image: path of the image embeddings by model.start; created if missing.
    None: OUT-embeddings, or OUT-views with data.cached_views.
    """
    cache: bool = True
    """With model.freeze=image: each image is embedded once, without augmentation. false: an
    augmented crop is embedded in every step.
    """
    cached_views: Annotated[int, Field(ge=0)] = 0
    """With model.freeze=image: the number of augmented crops of each image that are embedded once;
    later epochs use them in rotation.
    """
    hold_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of all images that is held out for evaluation, chosen by the hash of the key."""


class TextTowerConfig(Section):
    """The text transformer of CLIP. With text.start all sizes come from the start."""

    start: str | None = None
    """A model with two towers whose text tower, tokenizer and temperature the run starts from.
    None: random weights.
    """
    tokenizer: str | None = None
    """A directory with tokenizer.json and tokenizer_config.json. None: BERT's uncased vocabulary,
    which is part of mlcd.
    """
    context_length: Annotated[int, Field(ge=3)] = 77
    """The largest number of tokens of a text; longer texts are truncated."""
    width: Annotated[int, Field(ge=1)] = 512
    """The dimension of a token."""
    depth: Annotated[int, Field(ge=1)] = 12
    """The number of blocks."""
    heads: Annotated[int, Field(ge=1)] = 8
    """The number of attention heads in each block; a divisor of width."""
    mlp_width: Annotated[int, Field(ge=1)] | None = None
    """The hidden dimension of each block's MLP. None: four times width."""
    activation: Activation = "gelu"
    """The activation of the MLPs."""

    @model_validator(mode="after")
    def _no_dead_options(self) -> Self:
        for name, field in type(self).model_fields.items():
            if self.start and name != "start" and getattr(self, name) != field.default:
                raise ValueError(f"text.{name} must be left out with text.start, which sets it")
        return self

    def tower(self, *, vocab_size: int, eos_token_id: int, embedding_dim: int) -> TextConfig:
        """Returns the sizes of a tower that starts with random weights."""
        return TextConfig(
            vocab_size=vocab_size,
            context_length=self.context_length,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            mlp_width=self.mlp_width or 4 * self.width,
            embedding_dim=embedding_dim,
            activation=self.activation,
            causal=True,
            pooling="eos",
            eos_token_id=eos_token_id,
        )


class PairLossConfig(Section):
    """The loss over all image-text pairs of a step, gathered from all processes."""

    kind: PairLossKind
    """clip: a softmax over the texts for each image, and over the images for each text. siglip: a
    logistic loss for each pair.
    """
    scale: Annotated[float, Field(ge=1, le=100)] | None = None
    """The initial factor of the cosines (inverse temperature); learned, between 1 and 100. None:
    that of text.start, else 1 / 0.07 for clip and 10 for siglip.
    """
    bias: float | None = None
    """The initial bias of siglip's logits; learned. None: the bias of text.start, else -log(B - 1),
    where B is schedule.batch_size.
    """

    @model_validator(mode="after")
    def _no_dead_options(self) -> Self:
        if self.kind == "clip" and self.bias is not None:
            raise ValueError("loss.bias requires loss.kind=siglip, got clip")
        return self

    @property
    def default_scale(self) -> float:
        """Returns the initial scale if neither loss.scale nor text.start sets it."""
        return _SCALES[self.kind]


class PairsConfig(TrainingConfig):
    """The settings of a training on images with captions."""

    data: PairsDataConfig
    text: TextTowerConfig = TextTowerConfig()
    loss: PairLossConfig

    @property
    def cached(self) -> bool:
        """True if the images are embedded before the training."""
        return self.model.freeze == "image" and self.data.cache

    @property
    def supports_replay(self) -> bool:
        """False: --replay requires a run with labels."""
        return False

    @model_validator(mode="after")
    def _no_dead_options(self) -> Self:
        for applies, problem in self._contradictions():
            if applies:
                raise ValueError(problem)
        return self

    def _contradictions(self) -> Sequence[tuple[bool, str]]:
        frozen = self.model.freeze == "image"
        optim = self.optim
        return (
            (
                self.model.freeze == "tower",
                "model.freeze must be a number or image for pairs, got tower",
            ),
            (
                frozen and self.model.start is None,
                "model.freeze=image requires model.start, the tower to freeze",
            ),
            (
                self.augment.num_views > 1,
                "pairs require one view per image: set augment.views=1 and augment.local_views=0",
            ),
            (self.model.head is not None, "model.head requires training with labels"),
            (
                self.data.embeddings is not None and not self.cached,
                "data.embeddings requires model.freeze=image and data.cache",
            ),
            (
                not self.data.cache and not frozen,
                "data.cache=false requires model.freeze=image",
            ),
            (
                self.data.cached_views > 0 and not self.cached,
                "data.cached_views requires model.freeze=image and data.cache",
            ),
            (
                self.cached and not self.data.cached_views and self.augment != AugmentConfig(),
                "with model.freeze=image, augment requires data.cached_views or data.cache=false",
            ),
            (optim.center_lr is not None, "optim.center_lr requires training with labels"),
            (
                frozen and optim.layer_decay != 1.0,
                "optim.layer_decay must be 1 with model.freeze=image",
            ),
            (self.compute.backbone == "fsdp", "compute.backbone must be ddp for pairs, got fsdp"),
            (
                self.schedule.batch_size < 2,
                "schedule.batch_size must be at least 2 for pairs, got 1",
            ),
        )

    def identity(self) -> dict[str, Any]:
        """Returns the settings that decide the result; see `RunConfig.identity`."""
        excluded_data_fields = ("pairs", "embeddings", "memory_gib", "workers", "prefetch_steps")
        excluded: dict[str, Any] = {
            "out": True,
            "data": dict.fromkeys(excluded_data_fields, True),
            "model": {"start": True},
            "text": {"start": True, "tokenizer": True},
            "telemetry": True,
            "optim": {"max_skips": True},
            "compute": {"deterministic": True},
        }
        return {**self.model_dump(mode="json", exclude=excluded), "arithmetic": ARITHMETIC}


def load_any_config(recipe: str, overrides: Sequence[str] = ()) -> RunConfig | PairsConfig:
    """Reads a recipe with labels or pairs; for errors see `mlcd.training.config.load_config`."""
    return validate_any(read_fields(recipe, overrides))


def change_config(fields: dict[str, Any], overrides: Sequence[str]) -> RunConfig | PairsConfig:
    """Returns the configuration of these fields with overrides `a.b=c` applied."""
    return validate_any(apply_overrides(fields, overrides, {}))


def validate_any(fields: dict[str, Any]) -> RunConfig | PairsConfig:
    """Builds a PairsConfig or a RunConfig, depending on the fields; raises ConfigInvalid."""
    return build_config(PairsConfig, fields) if is_pairs_recipe(fields) else validate_config(fields)
