"""Floating-point operations of a step on pairs, counted as `mlcd.training.flops` does."""

from typing import Final

from mlcd.models.text import TextConfig
from mlcd.training.flops import backbone_flops, forward_flops
from mlcd.training.pairs.pairs_config import PairsConfig

_TRAINED: Final = 3  # one forward product and two in the backward pass


def pair_flops(config: PairsConfig, text: TextConfig, num_tokens: int) -> float:
    """Returns the FLOPs of one pair in a training step.

    num_tokens: tokens per text after truncation and padding. With several micro-batches, the
    forward pass of both towers runs twice, except for a frozen image tower.
    """
    images = 0.0 if config.cached else backbone_flops(config)
    texts = _TRAINED * text_flops(text, num_tokens)
    if config.compute.recompute:
        texts += _blocks_flops(text, num_tokens, recomputed=True)
    if config.compute.accumulation > 1:
        texts += text_flops(text, num_tokens)
        if config.model.freeze != "image":
            images += forward_flops(config.model.vit())
    products = _TRAINED * (2 if config.loss.kind == "clip" else 1)
    if config.loss.kind == "clip" and config.model.freeze == "image":
        products -= (
            1  # no gradient of the images; the scale needs the product in one direction only
        )
    return images + texts + products * 2.0 * config.schedule.batch_size * text.embedding_dim


def text_flops(text: TextConfig, num_tokens: int) -> float:
    """Returns the FLOPs of the forward pass of one text of `num_tokens` tokens."""
    return _blocks_flops(text, num_tokens) + 2.0 * text.width * text.embedding_dim


def _blocks_flops(text: TextConfig, num_tokens: int, *, recomputed: bool = False) -> float:
    """recomputed: count a recomputation, which leaves out each block's last product."""
    mlp = (1 if recomputed else 2) * text.width * text.mlp_width
    linear = 4 * text.width**2 + mlp
    return text.depth * (2.0 * num_tokens * linear + 4.0 * num_tokens**2 * text.width)
