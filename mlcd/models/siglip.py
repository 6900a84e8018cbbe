"""The vision transformer in SigLIP's layout: no class token, and a head that pools by attention.

Shapes and names follow `mlcd.models.vit`; the head adds `head.probe`, `head.attn.qkv`, ….
"""

import torch
from torch import Tensor, nn

from mlcd.errors import ConfigInvalid
from mlcd.models.blocks import MLP, Attention, BlockSizes, TransformerBlock
from mlcd.models.vit import Output, VisionTower, ViTConfig


class AttentionPooling(nn.Module):
    """One learned query that attends to all patches, and an MLP: [B, T, W] to [B, W]."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(sizes.width))
        self.attn = Attention(sizes)
        self.norm = nn.LayerNorm(sizes.width, eps=sizes.norm_eps)
        self.mlp = MLP(sizes)

    def forward(self, x_BTW: Tensor) -> Tensor:
        pooled_BW = self.attn.attend(self.probe.expand(x_BTW.shape[0], 1, -1), x_BTW)[:, 0]
        out: Tensor = pooled_BW + self.mlp(self.norm(pooled_BW))
        return out


class SiglipViT(VisionTower):
    """A tower from normalized float32 [B, 3, H, W] to embeddings [B, W] (not of unit length).

    H and W may be any multiples of the patch size: positions are resized bicubically.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch = nn.Conv2d(3, config.width, config.patch_size, stride=config.patch_size)
        self.pos = nn.Parameter(torch.empty(config.num_patches, config.width))
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.depth))
        self.norm_post = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = AttentionPooling(config)

    def forward(self, pixels_BCHW: Tensor, output: Output | None = None) -> Tensor:
        """Returns an output of the tower; None means pooled.

        Raises ConfigInvalid for the projection, which these towers lack.
        """
        if output == "projected":
            raise ConfigInvalid("this tower lacks a projection", remedy="use the output `pooled`")
        patch_BWhw = self.patch(pixels_BCHW)
        grid = (patch_BWhw.shape[2], patch_BWhw.shape[3])
        x_BTW: Tensor = patch_BWhw.flatten(2).transpose(1, 2) + self._positions(grid)
        for block in self.blocks[:-1]:
            x_BTW = block(x_BTW)
        if output == "penultimate_patches":
            return x_BTW
        x_BTW = self.blocks[-1](x_BTW)
        if output == "patches":
            return x_BTW
        pooled_BW: Tensor = self.head(self.norm_post(x_BTW))
        return pooled_BW
