"""A model of images and texts in one space: two towers and their learned temperature.

Shapes: M images, N texts, D embedding dimension.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlcd.errors import ConfigInvalid
from mlcd.models.text import TextTower
from mlcd.models.vit import ViT


class TwoTowers(nn.Module):
    """The two towers with `logit_scale`, the logarithm of the learned temperature, and SigLIP's
    learned `logit_bias`, None for CLIP.
    """

    def __init__(
        self,
        vision: ViT,
        text: TextTower,
        *,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        if vision.config.output_dim != text.config.embedding_dim:
            raise ConfigInvalid(
                "both towers need embeddings of the same dimension, got"
                f" {vision.config.output_dim} for images and {text.config.embedding_dim} for texts"
            )
        self.vision = vision
        self.text = text
        self.logit_scale = nn.Parameter(logit_scale.float().reshape(()))
        self.logit_bias = (
            None if logit_bias is None else nn.Parameter(logit_bias.float().reshape(()))
        )

    def forward(self, pixels_MCHW: Tensor, ids_NT: Tensor) -> Tensor:
        """Returns the logits of every pair of image and text, [M, N]."""
        image_MD, text_ND = self.embed_images(pixels_MCHW), self.embed_texts(ids_NT)
        logits_MN = torch.exp(self.logit_scale) * image_MD @ text_ND.T
        return logits_MN if self.logit_bias is None else logits_MN + self.logit_bias

    def embed_images(self, pixels_MCHW: Tensor) -> Tensor:
        """Returns unit rows, [M, D]."""
        return functional.normalize(self.vision(pixels_MCHW), dim=1)

    def embed_texts(self, ids_NT: Tensor) -> Tensor:
        """Returns unit rows, [N, D]."""
        return functional.normalize(self.text(ids_NT), dim=1)
