"""Floating-point operations of a tower and of a training step, two for each multiply-add.

Only matrix products are counted, as in published figures. Norms, activations and softmax add about
a percent.
"""

import math
from dataclasses import replace

from mlcd.models.vit import Output, ViTConfig
from mlcd.training.config import RunConfig, TrainingConfig


def forward_flops(vit: ViTConfig, output: Output = "projected") -> float:
    """Returns the FLOPs of the forward pass of one image.

    `patches` counts the last block for all tokens, as published figures do (8.82 GFLOP for B/32).
    Training, serving and the other outputs compute only the class token in the last block, which
    takes 2 to 7 % less.
    """
    return _patch_flops(vit) + sum(_block_flops(vit, output)) + _projection_flops(vit)


def backbone_flops(config: TrainingConfig, vit: ViTConfig | None = None) -> float:
    """Returns the FLOPs of the forward and backward pass of one view.

    The backward pass takes two products for each forward product, but none for the gradient of the
    pixels and none in frozen blocks. compute.recompute repeats the forward pass of the blocks,
    without each block's last product, whose result the backward pass does not need. vit: the tower
    at another resolution than the model's.
    """
    vit, frozen = vit or config.model.vit(), config.model.num_frozen
    if isinstance(config.model.freeze, str):
        return forward_flops(vit, "projected")
    blocks = _block_flops(vit, "projected")
    trained = sum(blocks[frozen:])
    queries = [vit.num_tokens] * (vit.depth - 1) + [1]
    last_products = 2.0 * vit.width * vit.mlp_width * sum(queries[frozen:])
    recomputed = trained - last_products if config.compute.recompute else 0.0
    patches = _patch_flops(vit) * (1 if frozen else 2)
    return patches + sum(blocks[:frozen]) + 3 * trained + recomputed + 3 * _projection_flops(vit)


def head_flops(config: RunConfig, num_classes: int) -> float:
    """Returns the FLOPs of all views of one image against the class centers of all processes,
    forward and backward.

    There are four products with the drawn centers: the logits, the logits again in the backward
    pass, and two gradients. Positives take three, gathered row by row.
    """
    dimension, columns = config.model.output_dim, config.loss.num_labels
    drawn = estimate_drawn(config, num_classes)
    return 2.0 * dimension * (4 * drawn + 3 * columns) * config.augment.num_views


def step_flops(config: RunConfig, num_classes: int) -> float:
    """Returns the FLOPs of tower and head for all views of one image, forward and backward.

    A step takes this number times the batch size.
    """
    augment, vit = config.augment, config.model.vit()
    sizes = [augment.size_of(view, vit.image_size) for view in range(augment.num_views)]
    towers = sum(backbone_flops(config, replace(vit, image_size=size)) for size in sizes)
    return towers + head_flops(config, num_classes)


def estimate_drawn(config: RunConfig, num_classes: int) -> float:
    """Returns the expected number of classes drawn as negatives in a step.

    The policy `partialfc` draws at least all positives of the step; their number is estimated for
    uniformly distributed labels.
    """
    batch = config.schedule.batch_size
    quota = max(1.0, float(int(config.loss.resolve_ratio(num_classes) * num_classes)))
    if config.loss.policy == "partialfc":
        return max(quota, estimate_distinct(batch * config.loss.num_labels, num_classes))
    return quota


def micro_batch(config: RunConfig) -> int:
    """Returns the images in a micro-batch, over all processes; a step has compute.accumulation of
    them.
    """
    return -(-config.schedule.batch_size // config.compute.accumulation)


def estimate_distinct(num_draws: float, num_classes: int) -> float:
    """Returns the expected number of distinct classes in `num_draws` uniform draws."""
    return -num_classes * math.expm1(num_draws * math.log1p(-1.0 / num_classes))


def _patch_flops(vit: ViTConfig) -> float:
    return 2.0 * 3 * vit.patch_size**2 * vit.width * vit.num_patches


def _projection_flops(vit: ViTConfig) -> float:
    return 2.0 * vit.width * (vit.embedding_dim or 0)


def _block_flops(vit: ViTConfig, output: Output) -> list[float]:
    """Returns the FLOPs of each block.

    Each query token needs query, attention scores, output and MLP; every token needs key and value.
    """
    tokens, width = vit.num_tokens, vit.width

    def block(queries: int) -> float:
        linear = queries * (2 * width**2 + 2 * width * vit.mlp_width) + tokens * 2 * width**2
        return 2.0 * linear + 4.0 * queries * tokens * width

    last = tokens if output == "patches" else 1
    return [block(tokens)] * (vit.depth - 1) + [block(last)]
