"""The pre-norm transformer block that image and text towers share.

Shapes: B batch, T tokens, Q queries, W width, H heads, D head dimension.
"""

from collections.abc import Mapping
from typing import Final, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlcd.errors import ConfigInvalid
from mlcd.models.rope import rotate

Activation = Literal["quick_gelu", "gelu", "gelu_pytorch_tanh"]
_QUICK_GELU: Final = 1.702  # the factor in x sigmoid(1.702 x), as in OpenAI's CLIP weights
ACTIVATIONS: Final[tuple[str, ...]] = get_args(Activation)

Rotation = tuple[Tensor, Tensor]


class BlockSizes(Protocol):
    """The part of a tower's config that its blocks need."""

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def mlp_width(self) -> int: ...
    @property
    def activation(self) -> Activation: ...
    @property
    def norm_eps(self) -> float: ...


def check_block_sizes(sizes: BlockSizes) -> None:
    """Raises ConfigInvalid for sizes that no block can have."""
    if min(sizes.width, sizes.heads, sizes.mlp_width) < 1:
        raise ConfigInvalid(f"a tower's sizes must be positive: {sizes}")
    if sizes.width % sizes.heads:
        raise ConfigInvalid(f"width must be a multiple of heads {sizes.heads}, got {sizes.width}")
    if sizes.activation not in ACTIVATIONS:
        raise ConfigInvalid(
            f"unknown activation {sizes.activation}", remedy=f"use {', '.join(ACTIVATIONS)}"
        )


@torch.no_grad()
def initialize(
    tower: nn.Module,
    sizes: BlockSizes,
    depth: int,
    own: Mapping[str, float],
    generator: torch.Generator,
) -> None:
    """Draws a tower's weights as CLIP does (openai/CLIP model.py); norms become the identity and
    biases zero.

    sizes, depth: sizes and number of the blocks. own: standard deviation of further parameters, by
    the suffix of their names.
    """
    width = sizes.width
    deviations = {
        "attn.qkv.weight": width**-0.5,
        "attn.out.weight": width**-0.5 * (2 * depth) ** -0.5,
        "mlp.fc1.weight": (2 * width) ** -0.5,
        "mlp.fc2.weight": width**-0.5 * (2 * depth) ** -0.5,
        "proj.weight": width**-0.5,
        "pos": 0.01,
        **own,
    }
    for name, parameter in tower.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            suffix = next(suffix for suffix in deviations if name.endswith(suffix))
            parameter.normal_(0.0, deviations[suffix], generator=generator)


class Attention(nn.Module):
    """Multi-head attention; `causal` lets a token see only itself and the tokens before it."""

    def __init__(self, sizes: BlockSizes, *, causal: bool = False) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.causal = causal
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(
        self, x_BTW: Tensor, rotation: Rotation | None = None, *, num_queries: int | None = None
    ) -> Tensor:
        """Attends from the first `num_queries` tokens, all if None; returns [B, num_queries, W]."""
        if num_queries is None:
            query, key, value = (self._heads(part) for part in self.qkv(x_BTW).chunk(3, dim=-1))
        else:
            query, key, value = self._project(x_BTW[:, :num_queries], x_BTW)
        if rotation is not None:
            cos_TR, sin_TR = rotation
            query = rotate(query, cos_TR[: query.shape[2]], sin_TR[: query.shape[2]])
            key = rotate(key, cos_TR, sin_TR)
        return self._attend(query, key, value)

    def _project(self, query_BQW: Tensor, x_BTW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width, weight, bias = x_BTW.shape[2], self.qkv.weight, self.qkv.bias
        query = functional.linear(query_BQW, weight[:width], bias[:width])
        key, value = functional.linear(x_BTW, weight[width:], bias[width:]).chunk(2, dim=-1)
        return self._heads(query), self._heads(key), self._heads(value)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x_BTW: Tensor) -> Tensor:
        """Splits the width into heads: [B, T, W] to [B, H, T, D]."""
        heads: Tensor = x_BTW.unflatten(2, (self.heads, -1)).transpose(1, 2)
        return heads


class MLP(nn.Module):
    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.fc1 = nn.Linear(sizes.width, sizes.mlp_width)
        self.fc2 = nn.Linear(sizes.mlp_width, sizes.width)
        self.activation = sizes.activation
        self._is_folded = False

    def forward(self, x_BTW: Tensor) -> Tensor:
        projected: Tensor = self.fc2(self._activate(self.fc1(x_BTW)))
        return projected

    @torch.no_grad()
    def fold_quick_gelu(self) -> None:
        """Replaces quick_gelu by a silu, for inference; other activations stay.

        x sigmoid(a x) equals silu(a x) / a; the weights absorb the factors a and 1 / a.
        """
        if self.activation != "quick_gelu" or self._is_folded:
            return
        self.fc1.weight.mul_(_QUICK_GELU)
        self.fc1.bias.mul_(_QUICK_GELU)
        self.fc2.weight.div_(_QUICK_GELU)
        self._is_folded = True

    def _activate(self, hidden: Tensor) -> Tensor:
        if self._is_folded:
            return functional.silu(hidden)
        if self.activation == "quick_gelu":
            return hidden * torch.sigmoid(_QUICK_GELU * hidden)
        approximate = "tanh" if self.activation == "gelu_pytorch_tanh" else "none"
        return functional.gelu(hidden, approximate=approximate)


class TransformerBlock(nn.Module):
    def __init__(self, sizes: BlockSizes, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width, eps=sizes.norm_eps)
        self.attn = Attention(sizes, causal=causal)
        self.norm2 = nn.LayerNorm(sizes.width, eps=sizes.norm_eps)
        self.mlp = MLP(sizes)

    def forward(
        self,
        x_BTW: Tensor,
        rotation: Rotation | None = None,
        branch_scale_2B: Tensor | None = None,
        *,
        num_queries: int | None = None,
    ) -> Tensor:
        """Applies the block; num_queries: see `Attention.forward`.

        branch_scale_2B: factors of each sample's attention and MLP output; training drops a branch
        by the factor 0.
        """
        attended = self.attn(self.norm1(x_BTW), rotation, num_queries=num_queries)
        if branch_scale_2B is None:
            x_BTW = x_BTW[:, :num_queries] + attended
            output: Tensor = x_BTW + self.mlp(self.norm2(x_BTW))
            return output
        attention_scale, mlp_scale = branch_scale_2B.to(attended.dtype)[:, :, None, None]
        x_BTW = x_BTW[:, :num_queries] + attention_scale * attended
        scaled: Tensor = x_BTW + mlp_scale * self.mlp(self.norm2(x_BTW))
        return scaled
