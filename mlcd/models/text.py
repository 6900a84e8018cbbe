"""The text transformers of CLIP and SigLIP: token ids to embeddings.

Shapes: N texts, T tokens, W width, D embedding dimension. Names follow our column of the key map
(`token`, `pos`, `blocks.i.attn.qkv`, `norm_post`, `proj`).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mlcd.errors import ConfigInvalid
from mlcd.models.blocks import Activation, TransformerBlock, check_block_sizes, initialize

# The token whose output becomes the embedding. eos: the first `eos_token_id`. highest_id: the first
# token with the row's highest id, which ends a text in OpenAI's vocabulary. last: the last token of
# the row, even if it is padding.
TextPooling = Literal["eos", "highest_id", "last"]


@dataclass(frozen=True)
class TextConfig:
    """The sizes, attention and pooling of a text tower.

    causal: whether a token attends only to itself and earlier tokens. eos_token_id: set if and only
    if pooling is eos.
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
            raise ConfigInvalid(
                "eos_token_id must be set if and only if pooling is eos, got pooling"
                f" {self.pooling} and {self.eos_token_id}"
            )


class TextTower(nn.Module):
    """A tower from int64 [N, T], T at most the context length, to embeddings [N, D] (not of unit
    length).

    Padding is not masked: causal towers pool a token before it, and SigLIP trains with padding.
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
        """Returns an embedding per row; raises ConfigInvalid if T exceeds the context length."""
        tokens = ids_NT.shape[1]
        if tokens > self.config.context_length:
            raise ConfigInvalid(
                f"a text must have at most {self.config.context_length} tokens, got {tokens}",
                remedy="shorten the texts with the model's tokenizer",
            )
        x_NTW = self.token(ids_NT) + self.pos[:tokens]
        for block in self.blocks:
            x_NTW = block(x_NTW)
        # shape[0], because len() would fix the number of rows in an exported graph
        rows = torch.arange(ids_NT.shape[0], device=ids_NT.device)
        embedding_ND: Tensor = self.proj(
            self.norm_post(x_NTW[rows, self._find_pooled_token(ids_NT)])
        )
        return embedding_ND

    def _find_pooled_token(self, ids_NT: Tensor) -> Tensor:
        if (eos := self.config.eos_token_id) is not None:
            return torch.eq(ids_NT, eos).int().argmax(dim=1)
        if self.config.pooling == "highest_id":
            return ids_NT.argmax(dim=1)
        return ids_NT.new_full((ids_NT.shape[0],), ids_NT.shape[1] - 1)
