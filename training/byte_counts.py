"""The bytes of a training run: tensors on each process's device, and a checkpoint on disk."""

from dataclasses import dataclass
from math import ceil
from typing import Final

import torch

from mlcd.models.vit import ViT, ViTConfig
from mlcd.training.config import RunConfig
from mlcd.training.flops import estimate_drawn, micro_batch
from mlcd.training.head.partial_fc import CHUNK_ENTRIES, CUDA_CHUNK_ENTRIES
from mlcd.training.head.shards import Shard
from mlcd.training.tower import is_trained

_INDEX_BYTES: Final = 8  # int64
_PIXEL_BYTES: Final = 4  # augmented images are float32
# RowAdamW: the moments, rows and quotients. Clipping before takes as much, for the gradient in
# float64 and its square.
_UPDATE_COPIES: Final = 6
# The gathered embeddings, this process's embeddings as sent, and the gradient.
_EMBEDDING_COPIES: Final = 3
# The cosines, a masked copy, and the mask of absent entries.
_LOGIT_COPIES: Final = 3


@dataclass(frozen=True)
class Memory:
    """The bytes on the process with the largest shard.

    backbone: weights, gradients and moments. backbone_copies: further copies of the weights for
    data parallelism and autocast. centers: this shard's rows, moments and clocks. center_gradient:
    the gradient of the rows that a step touches. activations: tensors kept for the backward pass,
    and the gradients alive at the same time. head: gathered embeddings and a chunk of logits.
    update: the optimizers' working memory, when the activations are freed.
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
        resident = self.backbone + self.backbone_copies + self.centers + self.center_gradient
        return resident + max(self.activations + self.head, self.update)


def num_parameters(config: RunConfig) -> int:
    """Returns the number of parameters of the backbone."""
    return sum(_counts(config, 1).values())


def checkpoint_bytes(config: RunConfig, num_classes: int) -> int:
    """Returns the bytes of one checkpoint, over all processes.

    Only tensors are counted; headers and manifests are some kilobytes more.
    """
    item, parameters, dimension = (
        _item_bytes(config),
        num_parameters(config),
        config.model.output_dim,
    )
    weights = 4 * parameters  # float32 weights for export
    unit_centers = num_classes * (4 * dimension + _INDEX_BYTES)  # the unit centers and their sizes
    state = item * (
        _count_copies(config) * parameters + 2 * _count_trained(config, _counts(config, 1))
    )
    return weights + unit_centers + state + _center_state(config, num_classes)


def snapshot_bytes(config: RunConfig, num_classes: int, world_size: int) -> int:
    """Returns the bytes in the first process's host memory while a checkpoint is written.

    That memory contains a copy of the process's part of the state, together with, first, the bytes
    of its file (the same number), then the unit centers of all classes and the rows they come from.
    """
    item = _item_bytes(config)
    owned = _count_owned(config, world_size)
    part = item * (_count_copies(config) * sum(owned.values()) + 2 * _count_trained(config, owned))
    part += center_bytes(config, num_classes, world_size)
    all_centers = num_classes * config.model.output_dim * (4 + item)
    return part + max(part, all_centers)


def activation_bytes(config: RunConfig, num_images: int, vit: ViTConfig | None = None) -> int:
    """Returns the bytes kept for the backward pass of one view of `num_images` images.

    The gradients that are alive when the backward pass starts are included. torch.compile keeps
    less. The residual stream is in float32 under bf16 autocast. vit: the tower at another
    resolution than the model's.
    """
    vit, stream = vit or config.model.vit(), _item_bytes(config)
    item = 2 if config.compute.precision == "bf16" else stream
    tokens, width = vit.num_tokens, vit.width
    hidden = (3 if vit.activation == "quick_gelu" else 2) * vit.mlp_width
    if isinstance(config.model.freeze, str):
        # Nothing is kept: one block's tensors are alive at a time.
        return num_images * (
            3 * vit.image_size**2 * (_PIXEL_BYTES + item)
            + tokens * (2 * stream * width + item * (4 * width + vit.mlp_width))
        )
    # Queries and keys are kept before and after their rotation, which is done in float32.
    rotated_bytes = 0
    if vit.positions == "rope":
        rotated_bytes = (item + (stream if item < stream else 0)) * width
    # Two residuals; the outputs of both norms, query, key, value and the attention's output; and
    # the MLP's hidden layer.
    block = tokens * (2 * stream * width + item * (6 * width + hidden) + 2 * rotated_bytes)
    if rotated_bytes:
        block += tokens * item * width  # the attention's output, transposed
    # Only the class token is a query in the last block.
    last = tokens * (stream * width + 3 * item * width + rotated_bytes)
    num_kept = max(0, vit.depth - 1 - config.model.num_frozen)
    blocks = num_kept * block + last
    if config.compute.recompute:
        blocks = (num_kept + 1) * tokens * stream * width + (block if vit.depth > 1 else last)
    # Tokens, and pixels as input of the patch embedding.
    embedding_input = tokens * stream * width
    if config.model.freeze == 0:
        embedding_input += 3 * vit.image_size**2 * item
    pixels = 3 * vit.image_size**2 * _PIXEL_BYTES
    gradients = tokens * (2 * item * vit.mlp_width + 2 * stream * width)
    return num_images * (pixels + embedding_input + blocks + gradients)


def backbone_bytes(config: RunConfig, world_size: int) -> int:
    """Returns the bytes of weights, their average, gradients and AdamW's two moments on the process
    with the largest shard.
    """
    owned = _count_owned(config, world_size)
    return _item_bytes(config) * (
        _count_copies(config) * sum(owned.values()) + 3 * _count_trained(config, owned)
    )


def center_bytes(config: RunConfig, num_classes: int, world_size: int) -> int:
    """Returns the bytes of class centers and their state on the process with the largest shard.

    The state is the moments and, with sparse updates, each row's step counter.
    """
    return _center_state(config, len(Shard.of(0, world_size, num_classes)))


def step_memory(config: RunConfig, num_classes: int, world_size: int) -> Memory:
    """Returns the peak memory of a step."""
    item, dimension = _item_bytes(config), config.model.output_dim
    micro_batch_size = micro_batch(config)
    rows = len(Shard.of(0, world_size, num_classes))
    sparse = config.loss.center_update == "sparse"
    passes = config.compute.accumulation * config.augment.num_views
    pass_rows = _gradient_rows(config, num_classes, rows) if sparse else rows
    gradient_rows = min(pass_rows * passes, rows)
    # The gradient summed over the passes so far, and the next pass's gradient.
    held_rows = gradient_rows + pass_rows if passes > 1 else pass_rows
    chunk = CHUNK_ENTRIES if config.device == "cpu" else CUDA_CHUNK_ENTRIES
    entries = max(micro_batch_size, min(chunk, micro_batch_size * rows))
    embeddings = (
        _EMBEDDING_COPIES * micro_batch_size * dimension
        + micro_batch_size * config.loss.num_labels * _INDEX_BYTES // item
    )
    return Memory(
        backbone=backbone_bytes(config, world_size),
        backbone_copies=_backbone_copies(config, world_size),
        centers=center_bytes(config, num_classes, world_size),
        center_gradient=held_rows * dimension * item,
        activations=activation_bytes(config, -(-micro_batch_size // world_size)),
        head=item * (embeddings + _LOGIT_COPIES * entries),
        update=_update_bytes(config, gradient_rows, world_size),
    )


def _center_state(config: RunConfig, rows: int) -> int:
    clocks = _INDEX_BYTES if config.loss.center_update == "sparse" else 0
    return rows * (3 * _item_bytes(config) * config.model.output_dim + clocks)


def _gradient_rows(config: RunConfig, num_classes: int, rows: int) -> int:
    """Returns the rows of the centers' gradient in one pass on a process that owns `rows` centers.

    An upper bound: one row for each class drawn here and each positive of all processes, without
    subtracting duplicates or positives of other shards, but at most `rows`.
    """
    drawn = ceil(rows * min(1.0, estimate_drawn(config, num_classes) / num_classes))
    return min(drawn + micro_batch(config) * config.loss.num_labels, rows)


def _backbone_copies(config: RunConfig, world_size: int) -> int:
    """Returns the bytes of autocast's bfloat16 weights and of the blocks that FSDP gathers."""
    parameters = num_parameters(config)
    cast = 2 * parameters if config.compute.precision == "bf16" else 0
    if world_size == 1 or config.compute.backbone == "ddp":
        return cast
    block = -(-parameters // config.model.depth)
    # The current block, the next block, and the gradients of both.
    if config.compute.gathered == "bf16":
        return block * (4 * 2 + _item_bytes(config))  # and one gradient during its sum
    return cast + 4 * _item_bytes(config) * block


def _update_bytes(config: RunConfig, gradient_rows: int, world_size: int) -> int:
    """Returns the bytes of the larger update: the backbone's and the centers' run in sequence."""
    center_items = _UPDATE_COPIES * gradient_rows * config.model.output_dim
    return _item_bytes(config) * max(
        _count_trained(config, _count_owned(config, world_size)), center_items
    )


def _count_copies(config: RunConfig) -> int:
    """Returns the number of copies of all weights: 1, or 2 with a moving average."""
    return 1 if config.optim.ema is None else 2


def _count_owned(config: RunConfig, world_size: int) -> dict[str, int]:
    """Returns each parameter's element count on the process with the largest shard."""
    return _counts(config, world_size if config.compute.backbone == "fsdp" else 1)


def _counts(config: RunConfig, num_shards: int) -> dict[str, int]:
    # FSDP2 shards each tensor over its first dimension.
    return {
        name: -(-shape[0] // num_shards) * shape[1:].numel()
        for name, shape in _shapes(config.model.vit()).items()
    }


def _count_trained(config: RunConfig, counts: dict[str, int]) -> int:
    return sum(count for name, count in counts.items() if is_trained(name, config.model))


def _shapes(vit: ViTConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in ViT(vit).named_parameters()}


def _item_bytes(config: RunConfig) -> int:
    return 8 if config.compute.precision == "fp64" else 4
