"""The text encoder of an engine in this process: OpenVINO or torch, behind one class."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.manifest import Artifact
from mlcd.encoders.text_encoder import Calibration
from mlcd.encoders.token_batches import TokenBatches
from mlcd.errors import ArtifactInvalid
from mlcd.models.text_part import FOLDER, SETTINGS, TOKENIZER, TextSettings
from mlcd.models.tokenizer import Tokenizer
from mlcd.types import Embeddings, Fingerprint, TokenBatch, model_name


@dataclass(frozen=True)
class TextPart:
    """The text part of a model artifact, without its tower."""

    name: str
    fingerprint: Fingerprint
    folder: Path
    settings: TextSettings
    tokenizer: Tokenizer


def open_text_part(artifact: Artifact) -> TextPart:
    """Opens the text part of a model artifact; raises ArtifactInvalid if it lacks one."""
    if artifact.fingerprint is None:
        raise ArtifactInvalid(
            f"{artifact.path} lacks a fingerprint", remedy="export the model again"
        )
    folder = artifact.file(f"{FOLDER}/{SETTINGS}").parent
    settings = TextSettings.read(folder)
    tokenizer = Tokenizer.open(artifact.file(f"{FOLDER}/{TOKENIZER}").parent)
    if tokenizer.context_length != settings.context_length:
        raise ArtifactInvalid(
            f"tokenizer and settings need the same context length, got {tokenizer.context_length}"
            f" and {settings.context_length} in {folder}",
            remedy="export the model again",
        )
    return TextPart(
        model_name(artifact.config.get("name")),
        artifact.fingerprint,
        folder,
        settings,
        tokenizer,
    )


class LocalTextEncoder:
    """The `TextEncoder` protocol over an engine in this process."""

    def __init__(
        self,
        part: TextPart,
        run: Callable[[TokenBatch], NDArray[np.float32]],
        close: Callable[[], None],
        *,
        engine: str,
        precision: str,
    ) -> None:
        """run: embeds a batch, ids [n, T] to rows [n, D]. close: frees the engine, after which
        `run` raises Unavailable.
        """
        self.name, self.fingerprint, self.tokenizer = part.name, part.fingerprint, part.tokenizer
        self.dimension, self.calibration = part.settings.dimension, Calibration.of(part.settings)
        self.engine, self.precision = engine, precision
        self._batches = TokenBatches(part.settings, part.tokenizer)
        self._run, self._close = run, close

    def encode(self, ids: TokenBatch) -> Embeddings:
        return self._batches.encode(ids, self._run)

    def close(self) -> None:
        self._close()
