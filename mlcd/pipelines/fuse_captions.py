"""Fuses the embedding of an image with that of its caption into one row."""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import pyarrow as pa

from mlcd.artifacts.manifest import Parent
from mlcd.errors import ConfigInvalid, TextRejected
from mlcd.images.matched_keys import match_keys
from mlcd.images.source import Source
from mlcd.pipelines.encoded import EncodedPart
from mlcd.pipelines.text_files import MAX_CHARS, TextFile
from mlcd.text_checks import check_text
from mlcd.types import Embeddings, Fingerprint, unit_rows

if TYPE_CHECKING:
    from mlcd.encoders.text_encoder import TextEncoder

FuseMode = Literal["mean", "concat"]
_BATCH: Final = 256


@dataclass(frozen=True)
class Fusion:
    """How the rows of images and captions become one row, with the weight w of the image:

    mean     (w image + (1 - w) caption) / norm, [D]
    concat   (sqrt(w) image, sqrt(1 - w) caption), [2D]: its cosines are the weighted means of the
             cosines of images and of captions

    captions: one per image; their ids are the keys of the images.
    """

    mode: FuseMode
    image_weight: float
    captions: TextFile
    encoder: "TextEncoder"

    def __post_init__(self) -> None:
        if not 0 < self.image_weight < 1:
            raise ConfigInvalid(
                f"the image's weight must be above 0 and below 1, got {self.image_weight}"
            )

    @cached_property
    def config(self) -> dict[str, object]:
        return {"fuse": self.mode, "image_weight": self.image_weight}

    def parent_of(self, out: Path) -> Parent:
        return replace(self.captions.parent_of(out), role="captions")

    def fingerprint(self, model: Fingerprint) -> Fingerprint:
        """Returns the fingerprint of fused rows, which cannot be compared with the model's own."""
        return hashlib.sha256(json.dumps([model, self.config]).encode()).hexdigest()

    def dimension(self, of_model: int) -> int:
        return of_model if self.mode == "mean" else 2 * of_model

    def match(self, source: Source) -> dict[str, object]:
        """Returns the captions by the keys of their images. Raises InvalidInput where none of them
        has an image.
        """
        ids = pa.chunked_array([pa.array(self.captions.keys, pa.large_string())])
        table = str(self.captions.path)
        matched = match_keys(ids, source.entries.key_column(), table)
        matched.unmatched.check(table, source.location, may_be_unmatched=True)
        keys = list(source.entries.keys())
        pairs = zip(matched.indices.tolist(), self.captions.texts, strict=True)
        return {keys[index]: text for index, text in pairs if index >= 0}

    def fuse(self, encoded: EncodedPart, caption_of: dict[str, object]) -> EncodedPart:
        """Returns the images of a part with fused rows; images without a usable caption become
        errors.
        """
        kept, texts, errors = [], [], [*encoded.errors]
        for index, entry in enumerate(encoded.entries):
            text = check_text(caption_of.get(entry.key), max_chars=MAX_CHARS)
            if isinstance(text, TextRejected):
                missing = entry.key not in caption_of
                reason = "no-caption" if missing else text.reason
                detail = "the table lacks a caption of this image" if missing else text.message
                errors.append({"key": entry.key, "reason": reason, "detail": detail})
            else:
                kept.append(index)
                texts.append(text)
        rows = self._combine(encoded.embeddings[kept], self._encode(texts))
        return EncodedPart(
            [encoded.entries[index] for index in kept],
            [encoded.image_sha256[index] for index in kept],
            rows,
            errors,
        )

    def _encode(self, texts: list[str]) -> Embeddings:
        parts = [
            self.encoder.encode(self.encoder.tokenizer(texts[start : start + _BATCH]))
            for start in range(0, len(texts), _BATCH)
        ]
        return np.concatenate([np.zeros((0, self.encoder.dimension), np.float32), *parts])

    def _combine(self, images: Embeddings, captions: Embeddings) -> Embeddings:
        weight = self.image_weight
        if self.mode == "mean":
            return unit_rows(weight * images.astype(np.float64) + (1 - weight) * captions)
        return np.hstack([weight**0.5 * images, (1 - weight) ** 0.5 * captions]).astype(np.float32)
