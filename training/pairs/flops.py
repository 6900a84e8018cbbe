"""Floating-point operations of a step of training on pairs, counted as `training.flops` does."""

from typing import Final

from mlcd.models.text import TextConfig
from training.flops import backbone_flops
from training.pairs.config import PairsConfig

_TRAINED: Final = 3  # backward takes two products for each forward one


def pair_flops(config: PairsConfig, text: TextConfig, num_tokens: int) -> float:
    """Returns the FLOPs of one pair in a training step.

    num_tokens: of a text, as its tower sees it.
    """
    images = 0.0 if config.cached else backbone_flops(config)
    products = 2 if config.loss.kind == "clip" else 1
    logits = products * 2.0 * config.schedule.batch_size * text.embedding_dim
    return images + _TRAINED * (text_flops(text, num_tokens) + logits)


def text_flops(text: TextConfig, num_tokens: int) -> float:
    """Returns the FLOPs of one text of so many tokens, forward."""
    linear = 4 * text.width**2 + 2 * text.width * text.mlp_width
    block = 2.0 * num_tokens * linear + 4.0 * num_tokens**2 * text.width
    return text.depth * block + 2.0 * text.width * text.embedding_dim
