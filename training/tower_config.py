"""The settings of the vision tower."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mlcd.models.blocks import Activation
from mlcd.models.vit import Positions, ViTConfig
from mlcd.training.section import Section


class TowerConfig(Section):
    """The vision transformer.

    With model.start all sizes come from the start, and only image_size may differ.
    """

    start: str | None = None
    """Weights to start from: a run or checkpoint, a model artifact, a directory of Hugging Face or
    open_clip, a file of weights, or hub:ORGANIZATION/MODEL. None: random weights.
    """
    like: str | None = None
    """For a bare file of weights: the published tower with its architecture and preprocessing."""
    head: Literal["kept", "new"] | None = None
    """kept: the centers of model.start. new: random centers. None: kept if the labels have the
    classes that the start was trained on, else new.
    """
    freeze: Annotated[int, Field(ge=0)] | Literal["tower", "image"] = 0
    """N: the first N blocks are frozen. tower: only the classifier is trained.
    image: only the text tower is trained, on pairs.
    """
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Stochastic depth: the share of samples for which the last block skips attention, and MLP, in
    training; it rises linearly from 0 at the first block.
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
    """The number of attention heads in each block; a divisor of width."""
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
                    raise ValueError(f"model.{name} requires model.start")
        if isinstance(self.freeze, str):
            if self.drop_path:
                raise ValueError(f"model.drop_path must be 0 with model.freeze={self.freeze}")
        elif self.freeze > self.depth:
            raise ValueError(
                f"model.freeze must be at most the tower's {self.depth} blocks, got {self.freeze}"
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
