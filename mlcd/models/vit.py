"""Vision transformer in CLIP's layout: class token, learned positions, pre-norm blocks.

Shapes: B batch, T tokens (1 + patches), W width, H heads, D embedding dimension.
Names follow our column of the key map in the documentation (`patch`, `cls`, `pos`, `blocks.i.attn.qkv`, …).
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlcd.errors import ConfigInvalid

Activation = Literal["quick_gelu", "gelu"]


@dataclass(frozen=True)
class ViTConfig:
    """Size of a tower. embedding_dim None: no projection, the embedding is the pooled class token."""

    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    mlp_width: int
    embedding_dim: int | None = None
    activation: Activation = "gelu"

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ConfigInvalid(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")
        if self.width % self.heads:
            raise ConfigInvalid(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.activation not in ("quick_gelu", "gelu"):
            raise ConfigInvalid(f"unknown activation {self.activation}", remedy="use quick_gelu or gelu")

    @property
    def num_tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def output_dim(self) -> int:
        return self.embedding_dim or self.width

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        try:
            return cls(**fields)
        except TypeError as error:
            raise ConfigInvalid(f"the model's config is not a ViT config: {sorted(fields)}") from error


class Attention(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTW: Tensor) -> Tensor:
        batch, tokens, width = x_BTW.shape
        qkv = self.qkv(x_BTW).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return projected


class MLP(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.mlp_width)
        self.fc2 = nn.Linear(config.mlp_width, config.width)
        self.quick = config.activation == "quick_gelu"

    def forward(self, x_BTW: Tensor) -> Tensor:
        hidden = self.fc1(x_BTW)
        # quick_gelu x sigmoid(1.702 x), as in OpenAI's CLIP weights.
        hidden = hidden * torch.sigmoid(1.702 * hidden) if self.quick else functional.gelu(hidden)
        projected: Tensor = self.fc2(hidden)
        return projected


class Block(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=1e-5)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x_BTW: Tensor) -> Tensor:
        x_BTW = x_BTW + self.attn(self.norm1(x_BTW))
        out: Tensor = x_BTW + self.mlp(self.norm2(x_BTW))
        return out


class ViT(nn.Module):
    """float32 [B, 3, S, S], normalized, to the embedding [B, D] (not of unit length)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch = nn.Conv2d(3, config.width, config.patch_size, stride=config.patch_size, bias=False)
        self.cls = nn.Parameter(torch.empty(config.width))
        self.pos = nn.Parameter(torch.empty(config.num_tokens, config.width))
        self.norm_pre = nn.LayerNorm(config.width, eps=1e-5)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm_post = nn.LayerNorm(config.width, eps=1e-5)
        self.proj = nn.Linear(config.width, config.embedding_dim, bias=False) if config.embedding_dim else nn.Identity()

    def initialize(self, generator: torch.Generator) -> None:
        """CLIP's initialization (openai/CLIP model.py), drawn from `generator`."""
        width, depth = self.config.width, self.config.depth
        deviations = {
            "attn.qkv.weight": width**-0.5,
            "attn.out.weight": width**-0.5 * (2 * depth) ** -0.5,
            "mlp.fc1.weight": (2 * width) ** -0.5,
            "mlp.fc2.weight": width**-0.5 * (2 * depth) ** -0.5,
            "patch.weight": (3 * self.config.patch_size**2) ** -0.5,
            "proj.weight": width**-0.5,
            "cls": width**-0.5,
            "pos": 0.01,
        }
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                elif name.endswith("bias"):
                    parameter.zero_()
                else:
                    suffix = next(suffix for suffix in deviations if name.endswith(suffix))
                    parameter.normal_(0.0, deviations[suffix], generator=generator)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        patches = self.patch(pixels_BCHW).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(patches.shape[0], 1, -1), patches], dim=1)
        x_BTW = self.norm_pre(tokens + self.pos)
        for block in self.blocks:
            x_BTW = block(x_BTW)
        embedding: Tensor = self.proj(self.norm_post(x_BTW[:, 0]))
        return embedding
