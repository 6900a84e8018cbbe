"""The servable form of a text tower, the same in export and service: token ids to unit rows."""

from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from mlcd.errors import ArtifactInvalid, ConfigInvalid
from mlcd.models.servable import fill
from mlcd.models.text import TextConfig, TextTower
from mlcd.models.text_part import SETTINGS, TOKENIZER, WEIGHTS, TextSettings
from mlcd.models.tokenizer import Tokenizer
from mlcd.models.two_towers import TwoTowers


class ServableText(nn.Module):
    """A model from int64 [N, T] to unit rows, float32 [N, D], with its tokenizer and settings."""

    def __init__(self, trunk: TextTower, tokenizer: Tokenizer, settings: TextSettings) -> None:
        super().__init__()
        self.trunk = trunk
        self.tokenizer = tokenizer
        self.settings = settings

    def forward(self, ids: Tensor) -> Tensor:
        return functional.normalize(self.trunk(ids).float(), dim=1)

    @classmethod
    def of(cls, towers: TwoTowers, tokenizer: Tokenizer) -> "ServableText":
        """Returns the text tower of a two-tower model.

        Raises ConfigInvalid if the tokenizer has more ids than the tower.
        """
        config = towers.text.config
        if tokenizer.num_ids > config.vocab_size:
            raise ConfigInvalid(
                f"the tokenizer must have at most the text tower's {config.vocab_size} tokens,"
                f" got {tokenizer.num_ids}",
                remedy=f"check that {TOKENIZER} belongs to these weights",
            )
        settings = TextSettings(
            tower="clip" if config.causal else "siglip",
            context_length=config.context_length,
            pad_id=tokenizer.pad_id,
            trims_padding=config.causal and config.pooling != "last" and tokenizer.pads_right,
            dimension=config.embedding_dim,
            logit_scale=towers.logit_scale.item(),
            logit_bias=None if towers.logit_bias is None else towers.logit_bias.item(),
            transformer=asdict(config),
        )
        return cls(towers.text, tokenizer, settings).eval()

    def write(self, directory: Path) -> None:
        """Writes model.safetensors, config.json and the tokenizer into an existing directory."""
        state = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in self.trunk.state_dict().items()
        }
        save_file(state, directory / WEIGHTS)
        self.settings.write(directory)
        self.tokenizer.write(directory)

    @classmethod
    def read(cls, directory: Path) -> "ServableText":
        """Reads the files of `write`.

        Raises ArtifactInvalid naming the file, and the tensor if one is missing or has the wrong
        shape.
        """
        settings = TextSettings.read(directory)
        try:
            config = TextConfig(**settings.transformer or {})
            state = load_file(directory / WEIGHTS)
        except (OSError, TypeError, SafetensorError) as error:
            raise ArtifactInvalid(
                f"the weights in {directory} cannot be read",
                remedy=f"it needs {WEIGHTS}, {SETTINGS}",
            ) from error
        with torch.device("meta"):
            trunk = TextTower(config)
        fill(trunk, state, str(directory / WEIGHTS))
        return cls(trunk, Tokenizer.open(directory), settings).eval()
