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
    """Images with captions: a folder, tar shards, parquet files or a zip. Of several captions of an
    image each step draws one.
    """
    embeddings: str | None = None
    """With model.freeze=image: embeddings of these images by model.start, or where to make them.
    None: OUT-embeddings, or OUT-views with data.cached_views.
    """
    cache: bool = True
    """With model.freeze=image: each image is embedded once, without augmentation. false: again
    in every step, from an augmented crop.
    """
    cached_views: Annotated[int, Field(ge=0)] = 0
    """With model.freeze=image: augmented crops of each image that are embedded once; later epochs
    take them in turn.
    """
    hold_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of all images that is kept for evaluation, chosen by the hash of the key."""


class TextTowerConfig(Section):
    """The text transformer, which is CLIP's. With text.start all sizes come from there."""

    start: str | None = None
    """A model with two towers whose text tower, tokenizer and temperature the run starts from.
    None: random weights.
    """
    tokenizer: str | None = None
    """A directory with tokenizer.json and tokenizer_config.json. None: BERT's uncased vocabulary,
    which is part of mlcd.
    """
    context_length: Annotated[int, Field(ge=3)] = 77
    """The largest number of tokens of a text; longer ones are cut."""
    width: Annotated[int, Field(ge=1)] = 512
    """The dimension of a token."""
    depth: Annotated[int, Field(ge=1)] = 12
    """The number of blocks."""
    heads: Annotated[int, Field(ge=1)] = 8
    """Attention heads in each block; they divide width."""
    mlp_width: Annotated[int, Field(ge=1)] | None = None
    """The hidden dimension of each block's MLP. None: four times width."""
    activation: Activation = "gelu"
    """The activation of the MLPs."""

    @model_validator(mode="after")
    def _no_dead_options(self) -> Self:
        for name, field in type(self).model_fields.items():
            if self.start and name != "start" and getattr(self, name) != field.default:
                raise ValueError(f"text.{name} must be left out with text.start, which states it")
        return self

    def tower(self, *, vocab_size: int, eos_token_id: int, embedding_dim: int) -> TextConfig:
        """Returns the sizes of a tower that begins with random weights."""
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
    """The loss over all pairs of an image and a text of a step, of all processes."""

    kind: PairLossKind
    """clip: a softmax over the texts for each image, and over the images for each text. siglip: a
    logistic loss for each pair.
    """
    scale: Annotated[float, Field(ge=1, le=100)] | None = None
    """The factor of the cosines that training starts from; it is learned, from 1 to 100. None:
    that of text.start, else 1 / 0.07 for clip and 10 for siglip.
    """
    bias: float | None = None
    """The bias of the logits that training starts from, for siglip; it is learned. None: that of
    text.start, else -log(B - 1), where B is schedule.batch_size.
    """

    @model_validator(mode="after")
    def _no_dead_options(self) -> Self:
        if self.kind == "clip" and self.bias is not None:
            raise ValueError("loss.bias requires loss.kind=siglip, got clip")
        return self

    @property
    def plain_scale(self) -> float:
        """Returns the scale to start from where nothing else states one."""
        return _SCALES[self.kind]


class PairsConfig(TrainingConfig):
    """The settings of a training on images with captions."""

    data: PairsDataConfig
    text: TextTowerConfig = TextTowerConfig()
    loss: PairLossConfig

    @property
    def cached(self) -> bool:
        """Tells whether the images are embedded before the training."""
        return self.model.freeze == "image" and self.data.cache

    @property
    def supports_replay(self) -> bool:
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
                "model.freeze=tower is for training with labels; write image",
            ),
            (
                frozen and self.model.start is None,
                "model.freeze=image needs model.start, the tower that is frozen",
            ),
            (self.augment.num_views > 1, "pairs take one view of an image: set augment.views=1"),
            (self.model.head is not None, "model.head is for training with labels"),
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
                "augment requires data.cached_views or data.cache=false with model.freeze=image",
            ),
            (optim.center_lr is not None, "optim.center_lr is for training with labels"),
            (
                frozen and optim.layer_decay != 1.0,
                "optim.layer_decay must be 1 with model.freeze=image",
            ),
            (self.compute.backbone == "fsdp", "compute.backbone must be ddp for pairs, got fsdp"),
            (self.schedule.batch_size < 2, "pairs need a schedule.batch_size of 2 or more"),
        )

    def identity(self) -> dict[str, Any]:
        """Returns the settings that decide the result; see `RunConfig.identity`."""
        places = ("pairs", "embeddings", "memory_gib", "workers", "prefetch_steps")
        excluded: dict[str, Any] = {
            "out": True,
            "data": dict.fromkeys(places, True),
            "model": {"start": True},
            "text": {"start": True, "tokenizer": True},
            "telemetry": True,
            "optim": {"max_skips": True},
            "compute": {"deterministic": True},
        }
        return {**self.model_dump(mode="json", exclude=excluded), "arithmetic": ARITHMETIC}


def load_any_config(recipe: str, overrides: Sequence[str] = ()) -> RunConfig | PairsConfig:
    """Reads a recipe with labels or with pairs; raises as `mlcd.training.config.load_config`."""
    return validate_any(read_fields(recipe, overrides))


def change_config(fields: dict[str, Any], overrides: Sequence[str]) -> RunConfig | PairsConfig:
    """Returns the configuration of these fields with `a.b=c` applied."""
    return validate_any(apply_overrides(fields, overrides, {}))


def validate_any(fields: dict[str, Any]) -> RunConfig | PairsConfig:
    """Builds the configuration that the fields are of; raises ConfigInvalid."""
    return build_config(PairsConfig, fields) if is_pairs_recipe(fields) else validate_config(fields)
