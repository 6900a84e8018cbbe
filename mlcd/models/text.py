"""The text transformers of CLIP and SigLIP: token ids to an embedding.

Shapes: N texts, T tokens, W width, D embedding dimension. Names follow our column of the key map
(`token`, `pos`, `blocks.i.attn.qkv`, `norm_post`, `proj`).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mlcd.errors import ConfigInvalid
from mlcd.models.blocks import Activation, TransformerBlock, check_block_sizes, initialize

# eos: the first token that is `eos_token_id`. highest_id: the first token of the highest id, which
# is the end of text in OpenAI's vocabulary. last: the last token of the row, padding or not.
TextPooling = Literal["eos", "highest_id", "last"]


@dataclass(frozen=True)
class TextConfig:
    """The sizes of a text tower, how far a token sees, and the token that becomes the embedding.

    causal: a token sees itself and those before it, else all. eos_token_id: set with pooling eos
    alone.
    """

    vocab_size: int
    context_length: int
    width: int
    depth: int
    heads: int
    mlp_width: int
    embedding_dim: int
    activation: Activation
    causal: bool
    pooling: TextPooling
    eos_token_id: int | None = None
    projection_bias: bool = False
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if min(self.vocab_size, self.context_length, self.depth, self.embedding_dim) < 1:
            raise ConfigInvalid(f"a tower's sizes must be positive: {self}")
        check_block_sizes(self)
        if self.pooling not in ("eos", "highest_id", "last"):
            raise ConfigInvalid(
                f"unknown pooling {self.pooling}", remedy="use eos, highest_id or last"
            )
        if (self.pooling == "eos") != (self.eos_token_id is not None):
            raise ConfigInvalid("eos_token_id is for pooling eos, which needs it")


class TextTower(nn.Module):
    """A tower of int64 [N, T], T at most the context length, to the embedding [N, D] (not of unit
    length).

    Padding is not masked: causal towers pool before it, and SigLIP's are trained with it.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.pos = nn.Parameter(torch.empty(config.context_length, config.width))
        self.blocks = nn.ModuleList(
            TransformerBlock(config, causal=config.causal) for _ in range(config.depth)
        )
        self.norm_post = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.proj = nn.Linear(config.width, config.embedding_dim, bias=config.projection_bias)

    def initialize(self, generator: torch.Generator) -> None:
        """Draws CLIP's initialization (openai/CLIP model.py) from `generator`."""
        initialize(self, self.config, self.config.depth, {"token.weight": 0.02}, generator)

    def forward(self, ids_NT: Tensor) -> Tensor:
        """Returns the embedding of every row; raises ConfigInvalid for rows beyond the context."""
        tokens = ids_NT.shape[1]
        if tokens > self.config.context_length:
            raise ConfigInvalid(
                f"{tokens} tokens are more than the context of {self.config.context_length}",
                remedy="shorten the texts with the model's tokenizer",
            )
        x_NTW = self.token(ids_NT) + self.pos[:tokens]
        for block in self.blocks:
            x_NTW = block(x_NTW)
        # shape, not len, which would fix the number of rows in an exported graph
        rows = torch.arange(ids_NT.shape[0], device=ids_NT.device)
        embedding_ND: Tensor = self.proj(self.norm_post(x_NTW[rows, self._place_to_pool(ids_NT)]))
        return embedding_ND

    def _place_to_pool(self, ids_NT: Tensor) -> Tensor:
        if (eos := self.config.eos_token_id) is not None:
            return torch.eq(ids_NT, eos).int().argmax(dim=1)
        if self.config.pooling == "highest_id":
            return ids_NT.argmax(dim=1)
        return ids_NT.new_full((ids_NT.shape[0],), ids_NT.shape[1] - 1)
