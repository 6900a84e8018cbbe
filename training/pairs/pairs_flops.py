"""Floating-point operations of a step on pairs, counted as `mlcd.training.flops` does."""

from typing import Final

from mlcd.models.text import TextConfig
from mlcd.training.flops import backbone_flops, forward_flops
from mlcd.training.pairs.pairs_config import PairsConfig

_TRAINED: Final = 3  # backward takes two products for each forward one


def pair_flops(config: PairsConfig, text: TextConfig, num_tokens: int) -> float:
    """Returns the FLOPs of one pair in a training step.

    num_tokens: of a text, as its tower sees it. With micro-batches, both towers go forward twice,
    but for images that are not trained.
    """
    images = 0.0 if config.cached else backbone_flops(config)
    texts = _TRAINED * text_flops(text, num_tokens)
    if config.compute.recompute:
        texts += _blocks_flops(text, num_tokens, again=True)
    if config.compute.accumulation > 1:
        texts += text_flops(text, num_tokens)
        if config.model.freeze != "image":
            images += forward_flops(config.model.vit())
    products = _TRAINED * (2 if config.loss.kind == "clip" else 1)
    if config.loss.kind == "clip" and config.model.freeze == "image":
        products -= 1  # the gradient of the images, which the scale needs in one direction alone
    return images + texts + products * 2.0 * config.schedule.batch_size * text.embedding_dim


def text_flops(text: TextConfig, num_tokens: int) -> float:
    """Returns the FLOPs of one text of so many tokens, forward."""
    return _blocks_flops(text, num_tokens) + 2.0 * text.width * text.embedding_dim


def _blocks_flops(text: TextConfig, num_tokens: int, *, again: bool = False) -> float:
    """again: as the backward pass computes them, which does not need a block's last product."""
    mlp = (1 if again else 2) * text.width * text.mlp_width
    linear = 4 * text.width**2 + mlp
    return text.depth * (2.0 * num_tokens * linear + 4.0 * num_tokens**2 * text.width)
