"""The bytes of a training run: tensors on each process's device, and a checkpoint on disk."""

from dataclasses import dataclass
from math import ceil
from typing import Final

import torch

from mlcd.models.vit import ViT, ViTConfig
from training.config import RunConfig
from training.flops import expected_distinct, expected_drawn, micro_batch
from training.parallel.partial_fc import CHUNK_ENTRIES
from training.parallel.shards import Shard

_INDEX_BYTES: Final = 8  # int64
_PIXEL_BYTES: Final = 4  # augmented images are float32
# RowAdamW: the gradient in float64 and its square for the norm take as much as the moments, rows
# and quotients.
_UPDATE_COPIES: Final = 6
# The gathered embeddings, those of this process as sent, and their gradient.
_EMBEDDING_COPIES: Final = 3
# The cosines, a masked copy, and the mask of absent entries.
_LOGIT_COPIES: Final = 3


@dataclass(frozen=True)
class Memory:
    """The bytes of the process that owns most.

    backbone: weights, gradients and moments. backbone_copies: what data parallelism and autocast
    hold beside them. centers: this shard's rows, moments and clocks. center_gradient: the gradient
    of the rows that a step touches. activations: tensors kept for the backward pass, and the
    gradients alive beside them. head: gathered embeddings and a chunk of logits. update: the
    optimizers' working memory, after the activations are gone.
    """

    backbone: int
    backbone_copies: int
    centers: int
    center_gradient: int
    activations: int
    head: int
    update: int

    @property
    def total(self) -> int:
        held = self.backbone + self.backbone_copies + self.centers + self.center_gradient
        return held + max(self.activations + self.head, self.update)


def num_parameters(config: RunConfig) -> int:
    """Returns the number of parameters of the backbone."""
    return sum(shape.numel() for shape in _shapes(config.model.vit()))


def checkpoint_bytes(config: RunConfig, num_classes: int) -> int:
    """Returns the bytes of one checkpoint, over all processes.

    Only tensors are counted; headers and manifests are some kilobytes more.
    """
    item, parameters, dimension = (
        _item_bytes(config),
        num_parameters(config),
        config.model.embedding_dim,
    )
    weights = 4 * parameters  # float32 weights for export
    unit_centers = num_classes * (4 * dimension + _INDEX_BYTES)  # the unit centers and their sizes
    return weights + unit_centers + 3 * item * parameters + _center_state(config, num_classes)


def snapshot_bytes(config: RunConfig, num_classes: int, world_size: int) -> int:
    """Returns the bytes in the first process's host memory while a checkpoint is written.

    They hold a copy of its part of the state. Beside it are, first, the bytes of its file (as many
    again), then the unit centers of all classes with the rows that they are made from.
    """
    item = _item_bytes(config)
    part = 3 * item * _owned_parameters(config, world_size) + center_bytes(
        config, num_classes, world_size
    )
    all_centers = num_classes * config.model.embedding_dim * (4 + item)
    return part + max(part, all_centers)


def activation_bytes(config: RunConfig, num_images: int) -> int:
    """Returns the bytes kept for the backward pass of `num_images` images.

    The gradients that are alive when it starts are included. torch.compile keeps less than this.
    The residual stream is in float32 under bf16 autocast.
    """
    vit, stream = config.model.vit(), _item_bytes(config)
    item = 2 if config.compute.precision == "bf16" else stream
    tokens, width = vit.num_tokens, vit.width
    hidden = (3 if vit.activation == "quick_gelu" else 2) * vit.mlp_width
    # There are two residuals; both norms' outputs, query, key, value and their mixture; and the
    # MLP's hidden layer.
    block = tokens * (2 * stream * width + item * (6 * width + hidden))
    # Only the class token is a query in the last block.
    last = tokens * (stream * width + 3 * item * width)
    blocks = (vit.depth - 1) * block + last
    if config.compute.recompute:
        blocks = vit.depth * tokens * stream * width + (block if vit.depth > 1 else last)
    pixels = 3 * vit.image_size**2 * (_PIXEL_BYTES + item)
    gradients = tokens * (2 * item * vit.mlp_width + 2 * stream * width)
    return num_images * (pixels + tokens * stream * width + blocks + gradients)


def backbone_bytes(config: RunConfig, world_size: int) -> int:
    """Returns the bytes of weights, gradients and AdamW's two moments on the process that owns
    most.
    """
    return 4 * _item_bytes(config) * _owned_parameters(config, world_size)


def center_bytes(config: RunConfig, num_classes: int, world_size: int) -> int:
    """Returns the bytes of class centers and their state on the process that owns most.

    The state is the moments and, with sparse updates, the steps of each row.
    """
    return _center_state(config, len(Shard.of(0, world_size, num_classes)))


def step_memory(config: RunConfig, num_classes: int, world_size: int) -> Memory:
    """Returns the memory at the worst moment of a step."""
    item, dimension = _item_bytes(config), config.model.embedding_dim
    at_once = micro_batch(config)
    rows = len(Shard.of(0, world_size, num_classes))
    touched = ceil(rows * _touched_share(config, num_classes))
    sparse = config.loss.center_update == "sparse"
    gradient_rows = min(touched * config.compute.accumulation, rows) if sparse else rows
    entries = max(at_once, min(CHUNK_ENTRIES, at_once * rows))
    embeddings = (
        _EMBEDDING_COPIES * at_once * dimension
        + at_once * config.loss.num_labels * _INDEX_BYTES // item
    )
    return Memory(
        backbone=backbone_bytes(config, world_size),
        backbone_copies=_backbone_copies(config, world_size),
        centers=center_bytes(config, num_classes, world_size),
        center_gradient=gradient_rows * dimension * item,
        activations=activation_bytes(config, -(-at_once // world_size)),
        head=item * (embeddings + _LOGIT_COPIES * entries),
        update=_update_bytes(config, gradient_rows, world_size),
    )


def _center_state(config: RunConfig, rows: int) -> int:
    clocks = _INDEX_BYTES if config.loss.center_update == "sparse" else 0
    return rows * (3 * _item_bytes(config) * config.model.embedding_dim + clocks)


def _touched_share(config: RunConfig, num_classes: int) -> float:
    """Returns the share of classes that a micro-batch draws or has as positives, for uniform
    labels.
    """
    columns = config.loss.num_labels
    positives = expected_distinct(micro_batch(config) * columns, num_classes) / num_classes
    drawn = min(1.0, expected_drawn(config, num_classes) / num_classes)
    if config.loss.kind == "per_column":
        drawn = 1.0 - (1.0 - drawn) ** columns
    return drawn + positives * (1.0 - drawn)


def _backbone_copies(config: RunConfig, world_size: int) -> int:
    """Returns the bytes of the bfloat16 weights that autocast keeps and the blocks that FSDP
    gathers.
    """
    parameters = num_parameters(config)
    cast = 2 * parameters if config.compute.precision == "bf16" else 0
    if world_size == 1 or config.compute.backbone == "ddp":
        return cast
    # The current block and the next one, and their gradients.
    return cast + 4 * _item_bytes(config) * -(-parameters // config.model.depth)


def _update_bytes(config: RunConfig, gradient_rows: int, world_size: int) -> int:
    """Returns the larger of two steps that follow each other: the backbone's and the centers'."""
    centers = _UPDATE_COPIES * gradient_rows * config.model.embedding_dim
    return _item_bytes(config) * max(_owned_parameters(config, world_size), centers)


def _owned_parameters(config: RunConfig, world_size: int) -> int:
    if config.compute.backbone == "ddp":
        return num_parameters(config)
    # FSDP2 shards each tensor over its first dimension.
    return sum(
        -(-shape[0] // world_size) * shape[1:].numel() for shape in _shapes(config.model.vit())
    )


def _shapes(vit: ViTConfig) -> list[torch.Size]:
    with torch.device("meta"):
        return [parameter.shape for parameter in ViT(vit).parameters()]


def _item_bytes(config: RunConfig) -> int:
    return 8 if config.compute.precision == "fp64" else 4
