"""The vision transformer in CLIP's layout: class token, learned or rotary positions, pre-norm
blocks.

Shapes: B batch, T tokens (class token, registers, patches), W width, H heads, D embedding
dimension. Names follow our column of the key map in the documentation (`patch`, `cls`, `pos`,
`blocks.i.attn.qkv`, …).
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlcd.errors import ConfigInvalid
from mlcd.models.blocks import Activation, TransformerBlock, check_block_sizes, initialize
from mlcd.models.rope import RotaryPositions

Positions = Literal["learned", "rope"]
# projected: [B, D], after the projection. pooled: [B, W], the class token after the last norm.
# patches: [B, P, W], before the last norm. penultimate_patches: patches one block earlier, the
# input of vision-language models (`hidden_states[-2]` without the class token).
Output = Literal["projected", "pooled", "patches", "penultimate_patches"]


@dataclass(frozen=True)
class ViTConfig:
    """The sizes of a tower.

    embedding_dim: dimension of the projection; None means that the embedding is the pooled output.
    registers: number of learned tokens without position and output (Darcet et al., 2024).
    """

    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    mlp_width: int
    embedding_dim: int | None = None
    activation: Activation = "gelu"
    positions: Positions = "learned"
    norm_eps: float = 1e-5
    registers: int = 0

    def __post_init__(self) -> None:
        sizes = (self.image_size, self.patch_size, self.depth)
        if min(sizes) < 1 or (self.embedding_dim is not None and self.embedding_dim < 1):
            raise ConfigInvalid(f"a tower's sizes must be positive: {self.to_dict()}")
        check_block_sizes(self)
        if self.image_size % self.patch_size:
            raise ConfigInvalid(
                f"image_size must be a multiple of patch_size {self.patch_size},"
                f" got {self.image_size}"
            )
        if self.positions not in ("learned", "rope"):
            raise ConfigInvalid(f"unknown positions {self.positions}", remedy="use learned or rope")
        if self.positions == "rope" and self.head_dim % 4:
            raise ConfigInvalid(f"rope needs a head dimension divisible by 4, got {self.head_dim}")
        if self.registers < 0:
            raise ConfigInvalid(f"registers must be at least 0, got {self.registers}")

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_tokens(self) -> int:
        return 1 + self.registers + self.num_patches

    @property
    def output_dim(self) -> int:
        return self.embedding_dim or self.width

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        # files of earlier versions state it
        fields = {key: x for key, x in fields.items() if (key, x) != ("pooling", "class_token")}
        try:
            return cls(**fields)
        except TypeError as error:
            raise ConfigInvalid(
                f"the model's config must have the fields of a ViT, got {sorted(fields)}"
            ) from error


class ViT(nn.Module):
    """A tower from normalized float32 [B, 3, H, W] to embeddings [B, D] (not of unit length).

    H and W may be any multiples of the patch size: rotary angles are computed for the grid, and
    learned positions are resized to it bicubically.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch = nn.Conv2d(
            3, config.width, config.patch_size, stride=config.patch_size, bias=False
        )
        self.cls = nn.Parameter(torch.empty(config.width))
        if config.positions == "rope":
            self.rope = RotaryPositions(config.head_dim, config.registers)
        else:
            self.pos = nn.Parameter(torch.empty(1 + config.num_patches, config.width))
        if config.registers:
            self.registers = nn.Parameter(torch.empty(config.registers, config.width))
        self.norm_pre = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.depth))
        self.norm_post = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.proj = (
            nn.Linear(config.width, config.embedding_dim, bias=False)
            if config.embedding_dim
            else nn.Identity()
        )

    def initialize(self, generator: torch.Generator) -> None:
        """Draws CLIP's initialization (openai/CLIP model.py) from `generator`."""
        deviations = {
            "patch.weight": (3 * self.config.patch_size**2) ** -0.5,
            "cls": self.config.width**-0.5,
            "registers": self.config.width**-0.5,
            "rope.cls_angle": (self.config.head_dim // 2) ** -0.5,
        }
        initialize(self, self.config, self.config.depth, deviations, generator)

    def forward(
        self,
        pixels_BCHW: Tensor,
        output: Output | None = None,
        branch_scales: Tensor | None = None,
    ) -> Tensor:
        """Returns an output of the tower; None means projected if there is a projection, otherwise
        pooled.

        branch_scales: [blocks, 2, B], see `TransformerBlock.forward`. Raises ConfigInvalid for
        `projected` if the tower lacks a projection.
        """
        if output == "projected" and self.config.embedding_dim is None:
            raise ConfigInvalid("this tower lacks a projection", remedy="use the output `pooled`")
        patch_BWhw = self.patch(pixels_BCHW)
        grid = (patch_BWhw.shape[2], patch_BWhw.shape[3])
        x_BTW = torch.cat(
            [self.cls.expand(patch_BWhw.shape[0], 1, -1), patch_BWhw.flatten(2).transpose(1, 2)],
            dim=1,
        )
        rotation = self.rope(grid) if self.config.positions == "rope" else None
        x_BTW = self._with_registers(
            x_BTW if rotation is not None else x_BTW + self._positions(grid)
        )
        x_BTW = self.norm_pre(x_BTW)
        scales = [None] * len(self.blocks) if branch_scales is None else branch_scales.unbind(0)
        for block, scale in zip(self.blocks[:-1], scales, strict=False):
            x_BTW = block(x_BTW, rotation, scale)
        if output != "penultimate_patches":
            # Without patches, only the class token is needed; for B/32 this saves 7 % of the work.
            num_queries = None if output == "patches" else 1
            x_BTW = self.blocks[-1](x_BTW, rotation, scales[-1], num_queries=num_queries)
        if output in ("patches", "penultimate_patches"):
            patches: Tensor = x_BTW[:, 1 + self.config.registers :]
            return patches
        pooled_BW: Tensor = self.norm_post(x_BTW[:, 0])
        if output == "pooled":
            return pooled_BW
        embedding_BD: Tensor = self.proj(pooled_BW)
        return embedding_BD

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        side = self.config.image_size // self.config.patch_size
        return self.pos if grid == (side, side) else resize_positions(self.pos, grid)

    def _with_registers(self, x_BTW: Tensor) -> Tensor:
        if not self.config.registers:
            return x_BTW
        registers = self.registers.expand(x_BTW.shape[0], -1, -1)
        return torch.cat([x_BTW[:, :1], registers, x_BTW[:, 1:]], dim=1)


def resize_positions(pos_TW: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resizes learned positions of a square grid to another grid: bicubic, as in transformers.

    The first row is the class token's and stays.
    """
    side = math.isqrt(len(pos_TW) - 1)
    square = pos_TW[1:].T.reshape(1, -1, side, side)
    resized = functional.interpolate(square, size=grid, mode="bicubic", align_corners=False)
    return torch.cat([pos_TW[:1], resized.flatten(2)[0].T])
